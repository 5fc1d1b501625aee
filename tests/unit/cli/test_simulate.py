"""`rekindle simulate`: its results, and refused arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rekindle.cli.main import main

SOLID = "max_restarts: 1000\nmax_recoveries: 10000\n"
FRAIL = "strategies: [restart]\nmax_restarts: 3\n"
SMALL = ("--nodes", "100", "--days", "20", "--runs", "5", "--faults", "byterobust")


class Done(NamedTuple):
    """The exit status of the command, and its output."""

    status: int
    out: str
    err: str


Simulate = Callable[..., Done]
Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def simulate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Simulate:
    """Return a function that runs the command in a folder with two policies."""
    (tmp_path / "solid.yaml").write_text(SOLID)
    (tmp_path / "frail.yaml").write_text(FRAIL)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(["simulate", *arguments])
        output = capfd.readouterr()
        return Done(int(ended.value.code or 0), output.out, output.err)

    return run


@pytest.fixture
def answer(simulate: Simulate, tmp_path: Path) -> Answer:
    """Return a function that runs the command and returns its JSON."""

    def run(*arguments: str) -> dict[str, Any]:
        done = simulate(*arguments, "--json", "answer.json")
        assert done.status == 0, done.err
        found: dict[str, Any] = json.loads((tmp_path / "answer.json").read_text())
        return found

    return run


def test_the_answer_has_all_that_was_promised(answer: Answer) -> None:
    """The result has goodput with its interval, incidents, spares, and the checkpoint interval."""
    found = answer("--policy", "solid.yaml", *SMALL)
    assert 0 < found["goodput_low"] < found["goodput"] < found["goodput_high"] < 1
    assert set(found["incidents"]) > {"recover", "recover-in-place", "restart"}
    assert found["spares"] >= found["spares_without_groups"] >= 1
    assert found["checkpoint_interval_s"] > 0
    assert sum(found["lost"].values()) + found["goodput"] == pytest.approx(1)


def test_it_is_printed_for_people(simulate: Simulate, tmp_path: Path) -> None:
    """The command prints the result as text, and writes a picture."""
    done = simulate("--policy", "solid.yaml", *SMALL, "--plot", "picture.png")
    assert (done.status, done.err) == (0, "")
    for words in ("95 % interval", "spares", "recover-in-place", "best interval", "by Young"):
        assert words in done.out
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_answer(answer: Answer) -> None:
    """The same seed gives the same result; another seed gives another result."""
    first = answer("--policy", "solid.yaml", *SMALL)
    assert answer("--policy", "solid.yaml", *SMALL) == first
    assert answer("--policy", "solid.yaml", *SMALL, "--seed", "1") != first


def test_two_policies_meet_the_same_faults(answer: Answer, simulate: Simulate) -> None:
    """Both policies get the same faults, and the result has the difference with its interval."""
    both = ("--policy", "frail.yaml", "--compare", "solid.yaml", *SMALL)
    found = answer(*both)
    gain = found["difference"]
    assert gain["goodput"] == pytest.approx(found["compare"]["goodput"] - found["goodput"])
    assert 0 < gain["goodput_low"] < gain["goodput_high"]
    done = simulate(*both, "--plot", "picture.png")
    assert "solid.yaml: goodput +" in done.out
    assert "it is better" in done.out


def test_a_policy_is_as_good_as_itself(answer: Answer, tmp_path: Path) -> None:
    """The same policy under another name has no difference."""
    (tmp_path / "same.yaml").write_text(SOLID)
    found = answer("--policy", "solid.yaml", "--compare", "same.yaml", *SMALL)
    assert found["difference"] == {"goodput": 0, "goodput_low": 0, "goodput_high": 0}


def test_a_file_of_own_faults_and_times(answer: Answer, tmp_path: Path) -> None:
    """The command uses the faults and times of the user's files."""
    (tmp_path / "faults.toml").write_text(
        '[[mix]]\nsource = "ours"\nper_1000_devices_per_day = 10.0\ngroup_share = 0.0\n'
        '[[fault]]\nname = "cable"\nweight = 1\nkind = "link"\n'
    )
    (tmp_path / "times.toml").write_text(
        '[[strategy]]\nstrategy = "retry"\ndevices = [8]\nseconds = [100.0]\nstate = "live"\n'
        "[[job]]\noverhead = 0.0\n"
    )
    own = ("--faults", "faults.toml", "--times", "times.toml")
    found = answer("--policy", "solid.yaml", *SMALL, *own)
    assert set(found["incidents"]) == {"retry"}
    assert found["lost"]["overhead"] == 0
    assert found["lost"]["recovering"] == pytest.approx(8 * 1.1 * 100.3 / 86_400, rel=0.3)


@pytest.mark.timeout(100)
def test_sixteen_thousand_devices_for_ninety_days(answer: Answer) -> None:
    """The command ends within the limit of this test; a slower algorithm would not."""
    size = ("--nodes", "2048", "--devices-per-node", "8", "--days", "90")
    answer("--policy", "solid.yaml", *size, "--faults", "byterobust")


POLICY = ("--policy", "solid.yaml", "--nodes", "10")
MIX = '[[mix]]\nsource = "s"\nper_1000_devices_per_day = 1.0\n'
FAULT = '[[fault]]\nname = "f"\nweight = 1\nkind = "link"\n'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--policy", "gone.yaml", "--nodes", "1"), "gone.yaml"),
        (("--policy", "solid.yaml", "--nodes", "0"), "--nodes 0: give a number of at least 1"),
        (
            (*POLICY, "--devices-per-node", "-8"),
            "--devices-per-node -8: give a number of at least 1",
        ),
        ((*POLICY, "--days", "-1"), "--days -1: give a number above 0"),
        ((*POLICY, "--days", "nan"), "--days nan: give a number above 0"),
        ((*POLICY, "--days", "1e9"), "faults, more than 1e+07; give fewer nodes or days"),
        ((*POLICY, "--runs", "4"), "--runs 4: give a number of at least 5"),
        ((*POLICY, "--seed", "-1"), "--seed -1: give a number of at least 0"),
        ((*POLICY, "--spares", "-1"), "--spares -1: give a number of at least 0"),
        ((*POLICY, "--min-nodes", "11"), "--min-nodes 11: give at most 10"),
        ((*POLICY, "--checkpoint-every", "0"), "--checkpoint-every 0: give a number above 0"),
        ((*POLICY, "--faults", "llama4"), "choose from llama3, rsc1, rsc2, byterobust, or give"),
        ((*POLICY, "--json", "gone/answer.json"), "does not exist; create it first"),
        ((*POLICY, "--json", "."), "cannot write .: "),
        ((*POLICY, "--plot", "."), "cannot write .: "),
    ],
)
def test_what_cannot_be_meant_is_refused(
    simulate: Simulate, arguments: tuple[str, ...], text: str
) -> None:
    """A wrong argument gives status 2, and one line with the mistake and the valid values."""
    done = simulate(*arguments)
    assert done.status == 2
    assert text in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("max_restarts: [", "policy.yaml"),
        ("max_restarts: -1", "max_restarts"),
        ("strategies: [reboot]", "reboot"),
        ("max_restart: 1", "max_restart"),
    ],
)
def test_a_bad_policy_is_refused(simulate: Simulate, tmp_path: Path, text: str, error: str) -> None:
    """The error names the file and the field, also for --compare."""
    (tmp_path / "policy.yaml").write_text(text)
    for arguments in (("--policy",), ("--policy", "solid.yaml", "--compare")):
        done = simulate(*arguments, "policy.yaml", "--nodes", "10")
        assert done.status == 2
        assert "policy.yaml" in done.err
        assert error in done.err


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [
        (FAULT, 1, "[[mix]] is missing"),
        (MIX, 1, "give [[fault]] entries or faults_of; neither is given"),
        (MIX + 'faults_of = "llama3"\n' + FAULT, 1, "both are given"),
        (MIX + 'faults_of = "llama2"\n', 4, "'llama2'; choose from llama3"),
        (MIX + MIX, 4, "line 1 already has a [[mix]]"),
        (MIX + FAULT + FAULT, 8, "this file already has an entry for 'f'"),
        (
            MIX + FAULT.replace("weight = 1", "weight = -1"),
            6,
            "weight is -1: Expected `float` > 0.0; give more than 0, at",
        ),
        (
            MIX + FAULT.replace("link", "lnk"),
            7,
            "kind is 'lnk'; choose from process",
        ),
        (MIX + FAULT.replace("link", "restore"), 7, "a mix cannot contain this kind"),
        (MIX + FAULT + "place = 1.5\n", 8, "place is 1.5: Expected `float` <= 1.0; give a share"),
        (MIX + FAULT + "place = 0.6\nscript = 0.6\n", 9, "their sum must be at most 1"),
        (MIX + FAULT + "plce = 0.5\n", 8, "unknown field `plce`; [[fault]] may have name"),
        (MIX.replace("1.0", "0.0") + FAULT, 3, "_day is 0.0: Expected `float` > 0.0"),
        (MIX + "lemon_factor = 0.5\n" + FAULT, 4, "give 1 or more"),
        (MIX + "[[faults]]\n", 4, "unknown table [[faults]]; choose from mix, fault"),
        (MIX + FAULT + "x = \n", 8, "invalid TOML"),
    ],
)
def test_a_bad_file_of_faults_is_refused(
    simulate: Simulate, tmp_path: Path, text: str, line: int, error: str
) -> None:
    """The error has the file, the line and the remedy."""
    (tmp_path / "faults.toml").write_text(text)
    done = simulate(*POLICY, "--faults", "faults.toml")
    assert done.status == 2
    assert f"faults.toml:{line}: " in done.err
    assert error in done.err


STRATEGY = '[[strategy]]\nstrategy = "retry"\ndevices = [8]\nseconds = [1.0]\nstate = "live"\n'


@pytest.mark.parametrize(
    ("text", "line", "error"),
    [
        (STRATEGY + STRATEGY, 6, "this file already has an entry for 'retry'"),
        (STRATEGY.replace("[1.0]", "[1.0, 2.0]"), 4, "one time for each number in devices"),
        (STRATEGY.replace("[1.0]", "[0.0]"), 4, "seconds has 0.0: Expected `float` > 0.0"),
        (STRATEGY.replace("[8]", "[8, 8]").replace("[1.0]", "[1.0, 2.0]"), 3, "smaller ones first"),
        (
            STRATEGY.replace("live", "alive"),
            5,
            "state is 'alive'; choose from live, memory, store",
        ),
        (STRATEGY.replace("retry", "reboot"), 2, "strategy is 'reboot'; choose from "),
        (STRATEGY + "succeeds = 0.0\n", 6, "give more than 0 and at most 1"),
        (
            '[[kind]]\nkind = "link"\ndetect_s = -1.0\nrepair_s = 1.0\n',
            3,
            "detect_s is -1.0: Expected `float` >= 0.0",
        ),
        ("[[job]]\nstep_s = 0.0\n", 2, "step_s is 0.0: Expected `float` > 0.0"),
        ("[[job]]\noverhead = 1.0\n", 2, "give 0 or more, less than 1"),
        ("[[jobs]]\n", 1, "unknown table [[jobs]]; choose from strategy, kind, job"),
    ],
)
def test_a_bad_file_of_times_is_refused(
    simulate: Simulate, tmp_path: Path, text: str, line: int, error: str
) -> None:
    """The error has the file, the line and the remedy."""
    (tmp_path / "times.toml").write_text(text)
    done = simulate(*POLICY, "--times", "times.toml")
    assert done.status == 2
    assert f"times.toml:{line}: " in done.err
    assert error in done.err


@pytest.mark.process
def test_it_needs_no_prefect(tmp_path: Path) -> None:
    """For a result as text, the command does not import Prefect, matplotlib or torch."""
    code = (
        "import sys; from rekindle.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print({'prefect', 'matplotlib', 'torch'} & set(sys.modules), file=sys.stderr)"
    )
    (tmp_path / "solid.yaml").write_text(SOLID)
    command = [sys.executable, "-c", code, "simulate", *POLICY, "--days", "1", "--runs", "5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "set()"
