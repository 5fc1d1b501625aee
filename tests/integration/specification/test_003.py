"""MindSpore's recovery from UCE: the script and the shell lines of the document, on 4 ranks on CPU.

`tests/support/document_003` has the script and the hook that lets it run without NPUs.
`tests/support/specification/document_003.py` has the sentences that these tests prove.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from document_003 import pictures, shell
from mindspore_jobs.job import MindSporeJob, needs_mindspore
from repository import SUPPORT

from rekindle.recovery.journal import journal
from rekindle.recovery.policy.policy import Strategy

pytestmark = [needs_mindspore, pytest.mark.timeout(400)]
HOOK = SUPPORT / "document_003" / "on_cpu.py"
RANKS, EPOCHS, BATCH = 4, 5, 32
STEPS = EPOCHS * (pictures.COUNT // BATCH)


def drawn(seed: int) -> list[tuple[int, int]]:
    """Return ranks and steps of errors. An incident is closed by the next step."""
    chance = random.Random(seed)
    steps = [2 * each for each in sorted(chance.sample(range(1, STEPS // 2), 2))]
    return [(chance.randrange(RANKS), step) for step in steps]


ERRORS = drawn(seed=3)


def run(
    folder: Path, errors: list[tuple[int, int]], *, switch: str = "", status: int = 0
) -> MindSporeJob:
    """Run the shell lines of the document, with errors of the device, to their end.

    switch: another value of MS_ENABLE_TFT. status: of the command.
    """
    asked = shell.command_of(shell.LINES, str(folder))
    assert asked.script == "UCE_case.py"
    if switch:
        asked.environment["MS_ENABLE_TFT"] = switch
    pictures.write(Path(asked.environment["DATA_PATH"]))
    job = MindSporeJob(
        folder,
        *(word for rank, step in errors for word in ("--error", f"{rank}:{step}")),
        ranks=asked.ranks,
        options=("--log-dir", asked.log_directory),
        program=HOOK,
        environment=asked.environment,
    )
    with job:
        assert job.end() == status, job.story()
    return job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> MindSporeJob:
    """Return a run without an error."""
    return run(tmp_path_factory.mktemp("undisturbed"), [])


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> MindSporeJob:
    """Return a run with errors."""
    return run(tmp_path_factory.mktemp("disturbed"), ERRORS)


def test_the_script_trains_as_the_shell_lines_start_it(undisturbed: MindSporeJob) -> None:
    """Four ranks do all steps of five epochs, and their logs are in the given folder."""
    assert {len(each["losses"]) for each in undisturbed.results().values()} == {STEPS}
    logs = list((undisturbed.folder / "uce_logs").rglob("stdout.log"))
    assert len(logs) == RANKS, undisturbed.story()
    for log in logs:
        text = log.read_text(errors="replace")
        assert "epoch: 5 step: 4, loss is" in text
        assert "out is:" in text
    assert "MS_ENABLE_TFT had no comma" in (undisturbed.folder / "output").read_text("latin-1")


def test_training_continues_at_the_step_behind_the_error(disturbed: MindSporeJob) -> None:
    """An error in step n costs no process and no step: all ranks continue with n+1."""
    incidents = disturbed.incidents()
    assert [each.strategy for each in incidents] == [Strategy.RETRY] * len(ERRORS)
    assert [each.resumed_at for each in incidents] == [step + 1 for _, step in ERRORS]
    assert [each.faults[0].rank for each in incidents] == [rank for rank, _ in ERRORS]
    assert len(disturbed.events_of(journal.RanksStarted)) == 1
    assert len(list(disturbed.folder.glob("result-*"))) == RANKS


def test_the_state_comes_from_a_replica(disturbed: MindSporeJob) -> None:
    """The damaged rank gets its state from another rank, and the others keep theirs."""
    formed = disturbed.events_of(journal.Formed)[1:]
    assert [each.sources for each in formed] == [{"peer": 1, "self": RANKS - 1}] * len(ERRORS)


def test_the_losses_of_each_rank_are_those_of_an_undisturbed_run(
    undisturbed: MindSporeJob, disturbed: MindSporeJob
) -> None:
    """Losses and parameters are equal bit by bit."""
    wanted = undisturbed.results()
    for rank, result in disturbed.results().items():
        assert result["losses"] == wanted[rank]["losses"]
        assert result["digest"] == wanted[rank]["digest"]


@pytest.mark.soak
@pytest.mark.parametrize("switch", ["{UCE:0, TTP:1}", "{TTP:1}"])
def test_last_words_alone(tmp_path: Path, switch: str) -> None:
    """Without UCE:1 an error ends the job, and a healthy rank saves the newest state."""
    job = run(tmp_path, [(2, 6)], switch=switch, status=1)
    assert {each.strategy for each in job.events_of(journal.Decided)} == {Strategy.FAIL}
    (saved,) = tmp_path.glob("ttp_checkpoints/ttp_saved_checkpoints-step_7/*/*")
    assert saved.name.endswith("-2_3.ckpt"), saved
    assert "rank_2" not in str(saved)
