"""Multi-bit errors of the device's memory: their time shows which updates are suspect."""

import pytest

from rekindle.training.torch.faults.repairs import UpdateTimes

# The texts of torch-npu 2.14 and of MindIO TFT.
TEXTS = ("HBM MULTI BIT ECC ERROR.time is {}", "HBM MULTI BIT ECC ERROR. time us= {}.")


class Clock:
    """A clock in microseconds that the test sets."""

    now = 0

    def __call__(self) -> int:
        return self.now


def times(*began: tuple[int, int]) -> tuple[UpdateTimes, Clock]:
    """Return the times of updates, from pairs of a step and its start time, and their clock."""
    clock = Clock()
    found = UpdateTimes(clock)
    for step, clock.now in began:
        found.begin(step)
        found.at(step)
    return found, clock


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    ("at_us", "clean"), [(301, 8), (300, 7), (201, 7), (200, 6), (101, 6), (1, 5)]
)
def test_updates_from_the_error_on_are_suspect(text: str, at_us: int, clean: int) -> None:
    """All updates that began at the error's time or later are suspect.

    Updates 6, 7 and 8 began at 100, 200 and 300 microseconds. A peer may have done the 9th.
    """
    known, _ = times((5, 50), (6, 100), (7, 200), (8, 300))
    assert known.valid_steps_after(RuntimeError(text.format(at_us))) == clean


def test_an_update_that_is_done_again() -> None:
    """If a rank repeats an update, the time of the last repetition counts."""
    known, _ = times((5, 50), (6, 100), (7, 200), (8, 300), (7, 400))
    assert known.valid_steps_after(RuntimeError(TEXTS[0].format(250))) == 6
    assert known.valid_steps_after(RuntimeError(TEXTS[0].format(450))) == 7


def test_several_optimizers() -> None:
    """With several optimizers, the start of the last one's update counts for the step.

    The rank may compute its gradients after the other updates.
    """
    known, clock = times((5, 50), (6, 100))
    for clock.now in (200, 300):
        known.begin(7)
    assert known.valid_steps_after(RuntimeError(TEXTS[0].format(250))) == 6


def test_a_step_without_an_update() -> None:
    """A step without an update, for example after an overflow, counts like other steps."""
    known, clock = times((6, 100))
    clock.now = 200
    known.at(7)
    assert known.valid_steps_after(RuntimeError(TEXTS[0].format(250))) == 7


def test_a_state_from_elsewhere() -> None:
    """A received state may contain this rank's gradients, so an earlier error makes it suspect.

    If the state is from an earlier step, the rank forgets its later updates.
    """
    known, clock = times((8, 800))
    clock.now = 900
    known.at(9)
    known.begin(10)
    assert known.valid_steps_after(RuntimeError(TEXTS[0].format(850))) == 8
    clock.now = 1000
    known.at(6)
    assert known.valid_steps_after(RuntimeError(TEXTS[0].format(1100))) == 6
    assert (
        known.valid_steps_after(RuntimeError(TEXTS[0].format(900))) == 6
    )  # the state has none of its gradients


def test_a_process_that_has_only_loaded_its_state() -> None:
    """If a process has only loaded its state, its errors do not make the state suspect."""
    known, clock = times()
    clock.now = 500
    known.at(100)
    for text in (TEXTS[0].format(400), TEXTS[0].format(600), "HBM MULTI BIT ECC ERROR"):
        assert known.valid_steps_after(RuntimeError(text)) == 100


def test_the_first_of_several_times() -> None:
    """If a text has several errors, the earliest time counts."""
    known, _ = times((5, 50), (6, 100), (7, 200), (8, 300))
    text = f"{TEXTS[0].format(350)} {TEXTS[1].format(250)}\nHCCL wait, the time is 7 s"
    assert known.valid_steps_after(RuntimeError(text)) == 7


def test_an_error_that_tells_no_time() -> None:
    """An error without a time makes the newest update suspect, because it may be older."""
    error = RuntimeError("HBM MULTI BIT ECC ERROR. time is , error code 1")
    assert times((6, 100), (7, 200))[0].valid_steps_after(error) == 6
    assert times((0, 100))[0].valid_steps_after(error) == 0
    assert times()[0].valid_steps_after(error) is None


@pytest.mark.parametrize("text", ["UCE ERROR time is 1", "time is 1", ""])
def test_other_errors_are_told_at_once(text: str) -> None:
    """Other errors make no finished update suspect."""
    assert times((6, 100))[0].valid_steps_after(RuntimeError(text)) is None
