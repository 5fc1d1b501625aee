"""Print the demo's results on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from job_side import Target
from place import OUTPUT, PORT, REPORT, ROOT
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from verdict import Verdict

from rekindle.recovery.journal.journal import Incident
from rekindle.reporting.event_text import clock, sources_in_words

console = Console(highlight=False)


class Steps:
    """A progress bar that follows a job's steps."""

    def __init__(self, progress: Progress, target: Target, total: int) -> None:
        self._progress = progress
        self._target = target
        self._bar = progress.add_task(target.job_id, total=total)

    def show(self) -> int:
        """Show how many steps are finished, and return that number."""
        finished = self._target.steps()
        self._progress.update(self._bar, completed=finished)
        return finished


@contextmanager
def progress_of(target: Target, total: int) -> Iterator[Steps]:
    """Show a progress bar for a job while the block runs."""
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(40),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield Steps(progress, target, total)


def say(text: str) -> None:
    """Print one line of the demo's report."""
    console.print(text)


def incident_table(found: list[Incident], killed: list[tuple[str, float]]) -> Table:
    """Return a table of all incidents; times are milliseconds after the kill."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("#", "killed", "strategy"):
        table.add_column(name, no_wrap=True)
    for name in ("detected", "regrouped", "restored", "first\ngood\nstep", "steps\nlost"):
        table.add_column(name, justify="right", no_wrap=True)
    for one, (what, at) in zip(found, killed, strict=True):
        moments = (one.detected, one.regrouped, one.restored, one.first_step)
        table.add_row(
            str(one.number),
            what,
            one.strategy.value if one.strategy else "-",
            *(f"{(moment - at) * 1000:.0f}" if moment else "-" for moment in moments),
            str(one.steps_lost),
        )
    return table


def show_incidents(found: list[Incident], killed: list[tuple[str, float]]) -> None:
    """Print the table, and the reason for each strategy."""
    console.print("\n[bold]Incidents[/bold], in milliseconds after the kill")
    console.print(incident_table(found, killed))
    for one in found:
        console.print(f"  #{one.number} {clock(one.detected)} UTC: {one.reason}.")
        console.print(f"     State came from: {sources_in_words(one.sources)}.")


def show_verdict(verdict: Verdict, flow_reruns: int) -> None:
    """Print the comparison with the undisturbed run."""
    same = verdict.losses - len(verdict.differing)
    digest = next(iter(verdict.digests.values()))[0][:16]
    rows = [
        (not verdict.differing, f"{same} of {verdict.losses} losses are the same, bit for bit"),
        (verdict.loss_identical, f"final parameters of all ranks of both runs: {digest}"),
        (not verdict.samples_lost, f"{verdict.samples_lost} of {verdict.samples} samples lost"),
        (not verdict.samples_repeated, f"{verdict.samples_repeated} samples trained on twice"),
        (flow_reruns == 1, f"the flow's process was killed, and run again: {flow_reruns} time"),
        (not verdict.leftover, f"{len(verdict.leftover)} processes or memory segments left over"),
    ]
    console.print("\n[bold]Compared with the undisturbed run[/bold]")
    for good, text in rows:
        console.print(f"  {'[green]yes[/green]' if good else '[red]NO [/red]'}  {text}")
    for line in (*verdict.leftover, *(f"rank {r} step {s}" for r, s in verdict.differing[:5])):
        console.print(f"       {line}")


def show_places(timeline: Path, flow_run: str) -> None:
    """Print the places of further results."""
    output = OUTPUT.relative_to(ROOT)
    console.print(
        f"\n[bold]Look further[/bold]\n"
        f"  timeline   {timeline.relative_to(ROOT)}\n"
        f"  figures    {REPORT} and {output / REPORT}\n"
        f"  Prefect UI start the server again on the demo's database, then open the flow run:",
        soft_wrap=True,
    )
    console.print(
        f'    PREFECT_HOME="$PWD/{output / "prefect"}" '
        f"PREFECT_SERVER_UI_API_URL=http://127.0.0.1:{PORT}/api \\\n"
        f"      .venv/bin/prefect server start --port {PORT}\n"
        f"    http://127.0.0.1:{PORT}/v2/runs/flow-run/{flow_run}",
        soft_wrap=True,
        markup=False,
    )
