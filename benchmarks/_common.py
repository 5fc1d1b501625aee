"""The parts that all benchmarks share: options, folders, summaries, tables and the JSON file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
RANKS = 4


def options(description: str) -> argparse.ArgumentParser:
    """Return the common command line; each benchmark adds its own options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, under a minute")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=Path("/dev/stdout"),
        metavar="FILE",
        help="write the figures there too",
    )
    return parser


def need_torch() -> None:
    """Exit with an explanation if PyTorch, and with it torchrun, is not installed."""
    if importlib.util.find_spec("torch") is None:
        print(
            "torch and torchrun are not installed: nothing was measured. "
            "Install the extra: pip install 'rekindle[torch]'",
            file=sys.stderr,
        )
        sys.exit(2)


@contextmanager
def place() -> Iterator[Path]:
    """Yield a temporary folder for the run's files and its jobs; SIGTERM ends them like Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="rekindle-benchmark-") as folder:
        yield Path(folder)


def clean_environment(home: Path) -> dict[str, str]:
    """Return the jobs' environment: this process's, without variables of another job."""
    ours = ("REKINDLE_", "TORCHELASTIC_")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in names and not name.startswith(ours)
    }
    return kept | {
        "REKINDLE_HOME": str(home),
        "TMPDIR": str(home),  # torchrun puts its log folders there
        # torchrun would set it with a warning; Rekindle sets it too.
        "OMP_NUM_THREADS": "1",
    }


def milliseconds_of(script: str, *arguments: object) -> list[float]:
    """Return the milliseconds that a script of this folder prints, one number for each turn."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return [float(text) for text in done.stdout.split()]


def summary(milliseconds: Sequence[float]) -> dict[str, float | int]:
    """Return median, minimum, maximum and count under the keys that all benchmarks use."""
    if not milliseconds:
        return {"count": 0}
    return {
        "median_ms": round(statistics.median(milliseconds), 3),
        "min_ms": round(min(milliseconds), 3),
        "max_ms": round(max(milliseconds), 3),
        "count": len(milliseconds),
    }


def ratio(peer: dict[str, Any], ours: dict[str, Any]) -> float | None:
    """Return the peer's median time as a multiple of ours; None: one of them has no times."""
    if not peer.get("count") or not ours.get("count"):
        return None
    return round(float(peer["median_ms"] / ours["median_ms"]), 2)


def show_summaries(title: str, rows: dict[str, dict[str, Any]]) -> None:
    """Print one line of milliseconds per name."""
    table(
        (title, "min", "median", "max", "count"),
        [
            (
                name,
                *(number(row.get(f"{key}_ms")) for key in ("min", "median", "max")),
                row["count"],
            )
            for name, row in rows.items()
        ],
    )


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under a head, the first column to the left and all others to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    print()
    for row in cells:
        first, *others = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join((first, *others)).rstrip())
    sys.stdout.flush()


def number(value: float | None) -> str:
    """Return a number as text, without decimals from 100."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def load() -> float:
    """Return the machine's number of running processes, averaged over a minute."""
    return round(os.getloadavg()[0], 2)


class Conditions:
    """The conditions of the measurement: versions, cores, and the load before and after."""

    def __init__(self) -> None:
        self._before = load()

    def as_json(self) -> dict[str, Any]:
        """Return the values for the JSON file and the printout."""
        return {
            "cores": os.cpu_count(),
            "load_before": self._before,
            "load_after": load(),
            "python": platform.python_version(),
            "torch": _version("torch"),
            "rekindle": _version("rekindle"),
        }


def finish(result: dict[str, Any], conditions: Conditions, file: Path | None) -> None:
    """Print the conditions, and write the figures to the file if there is one."""
    result["conditions"] = conditions.as_json()
    print("\nconditions: " + ", ".join(f"{k} {v}" for k, v in result["conditions"].items()))
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
