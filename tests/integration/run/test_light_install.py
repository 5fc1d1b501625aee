"""`pip install rekindle` without extras: an environment with its named dependencies only."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Place
from packaging.requirements import Requirement
from repository import ROOT

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

TASKD = ROOT / "tests" / "unit" / "profiling" / "taskd.jsonl"
SMALL = ("--nodes", "10", "--days", "1", "--runs", "5")
SCRIPT = """
import os, time

print("begins", flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
print("ends", flush=True)
"""


def closure(name: str, extras: frozenset[str] = frozenset()) -> Iterator[str]:
    """Return a distribution and all its dependencies here."""
    seen: set[str] = set()
    waiting = [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        yield name
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            wanted = [{"extra": extra} for extra in extras or ("",)]
            if needed.marker is None or any(map(needed.marker.evaluate, wanted)):
                waiting.append((needed.name, frozenset(needed.extras)))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the interpreter of an environment with Rekindle and links to its dependencies."""
    home = tmp_path_factory.mktemp("light")
    venv.create(home)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "rekindle").symlink_to(ROOT / "rekindle")
    for name in closure("rekindle"):
        if name == "rekindle":
            continue
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if ".." not in file.parts}:
            where = Path(str(distribution.locate_file(top)))
            if where.exists() and not (site / top).exists():
                (site / top).symlink_to(where)
    return str(home / "bin/python")


def test_what_is_there(python: str) -> None:
    """The environment has neither Prefect nor matplotlib nor a framework."""
    absent = ["prefect", "pydantic", "matplotlib", "torch", "kubernetes", "boto3", "httpx"]
    script = f"import importlib.util as u; print([n for n in {absent} if u.find_spec(n)])"
    found = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_killed_rank(place: Place, python: str) -> None:
    """The agent and the coordinator run, and restart the ranks."""
    script = place.script(SCRIPT)
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--no-python", python, script)
    run = place.start(*options, interpreter=python)
    for rank in (0, 1):
        run.wait_for_output(rank, "begins")
    run.kill(1)
    run.end(0)
    assert [each.strategy for each in run.events_of(journal.Decided)] == [Strategy.RESTART]
    assert run.log(1, restart=1) == "begins\nends\n"


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (
            ("kubernetes", "render", "job.yaml"),
            "pydantic is not installed: pip install 'rekindle[p",
        ),
        (
            ("diagnose", "records", "--picture", "map.png"),
            "matplotlib is not installed: pip install 'rekindle[prefect]'",
        ),
        (
            ("simulate", "--policy", "policy.yaml", *SMALL, "--plot", "losses.png"),
            "matplotlib is not installed: pip install 'rekindle[prefect]'",
        ),
        (
            ("nodes", "--kubeconfig", "config"),
            "urllib3 is not installed: pip install 'rekindle[kubernetes]'",
        ),
        (("status", "none"), ""),
        (("simulate", "--help"), ""),
    ],
)
def test_a_command_that_needs_an_extra_names_it(
    place: Place, python: str, command: tuple[str, ...], extra: str
) -> None:
    """A command without its extra fails with one line that names the extra; others run."""
    (place.folder / "job.yaml").write_text("script: train.py\n")
    (place.folder / "policy.yaml").write_text("max_restarts: 3\n")
    (place.folder / "records" / "0").mkdir(parents=True)
    shutil.copy(TASKD, place.folder / "records" / "0" / "1")
    ended = subprocess.run(
        [python, "-m", "rekindle.cli.main", *command],
        cwd=place.folder,
        env=place.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ended.stderr
    assert "is not installed" not in ended.stderr or extra
    assert extra in ended.stderr
    assert len(ended.stderr.splitlines()) <= 1


def test_a_name_that_needs_an_extra(python: str) -> None:
    """`from rekindle import train` fails with the command that installs Prefect."""
    ended = subprocess.run(
        [python, "-c", "from rekindle import train"], capture_output=True, text=True, check=False
    )
    assert "prefect is not installed: pip install 'rekindle[prefect]'" in ended.stderr
    assert ended.returncode == 1
