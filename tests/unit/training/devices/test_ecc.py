"""Multi-bit errors of the device's memory: by its time, one says which updates are suspect."""

import pytest

from rekindle.training.torch.faults.repairs import UpdateTimes

# As torch-npu 2.14 and as MindIO TFT write it.
TEXTS = ("HBM MULTI BIT ECC ERROR.time is {}", "HBM MULTI BIT ECC ERROR. time us= {}.")


class Clock:
    """Microseconds as a test tells them."""

    now = 0

    def __call__(self) -> int:
        return self.now


def times(*began: tuple[int, int]) -> tuple[UpdateTimes, Clock]:
    """Updates that finish these steps, at these times."""
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
    """Updates 6, 7 and 8 began at 100, 200 and 300 microseconds; a peer may have done the 9th."""
    known, _ = times((5, 50), (6, 100), (7, 200), (8, 300))
    assert known.clean_after(RuntimeError(text.format(at_us))) == clean


def test_an_update_that_is_done_again() -> None:
    """The time of the one that counts is the last one's."""
    known, _ = times((5, 50), (6, 100), (7, 200), (8, 300), (7, 400))
    assert known.clean_after(RuntimeError(TEXTS[0].format(250))) == 6
    assert known.clean_after(RuntimeError(TEXTS[0].format(450))) == 7


def test_several_optimizers() -> None:
    """The gradients of the second are computed after the first has begun."""
    known, clock = times((5, 50), (6, 100))
    for clock.now in (200, 300):
        known.begin(7)
    assert known.clean_after(RuntimeError(TEXTS[0].format(250))) == 6


def test_a_step_without_an_update() -> None:
    """One that was left out, for the gradients overflowed, is a step like others."""
    known, clock = times((6, 100))
    clock.now = 200
    known.at(7)
    assert known.clean_after(RuntimeError(TEXTS[0].format(250))) == 7


def test_a_state_from_elsewhere() -> None:
    """Its own gradients may be in it; what it had of later steps is gone."""
    known, clock = times((8, 800))
    clock.now = 900
    known.at(9)
    known.begin(10)
    assert known.clean_after(RuntimeError(TEXTS[0].format(850))) == 8
    clock.now = 1000
    known.at(6)
    assert known.clean_after(RuntimeError(TEXTS[0].format(1100))) == 6
    assert known.clean_after(RuntimeError(TEXTS[0].format(900))) == 6  # nothing of its own is in it


def test_a_process_that_has_only_loaded_its_state() -> None:
    """It has no part in that: its errors say nothing of the checkpoint."""
    known, clock = times()
    clock.now = 500
    known.at(100)
    for text in (TEXTS[0].format(400), TEXTS[0].format(600), "HBM MULTI BIT ECC ERROR"):
        assert known.clean_after(RuntimeError(text)) == 100


def test_the_first_of_several_times() -> None:
    """Errors are told with those that came after them, and with others."""
    known, _ = times((5, 50), (6, 100), (7, 200), (8, 300))
    text = f"{TEXTS[0].format(350)} {TEXTS[1].format(250)}\nHCCL wait, the time is 7 s"
    assert known.clean_after(RuntimeError(text)) == 7


def test_an_error_that_tells_no_time() -> None:
    """It may be older than the newest update."""
    error = RuntimeError("HBM MULTI BIT ECC ERROR. time is , error code 1")
    assert times((6, 100), (7, 200))[0].clean_after(error) == 6
    assert times((0, 100))[0].clean_after(error) == 0
    assert times()[0].clean_after(error) is None


@pytest.mark.parametrize("text", ["UCE ERROR time is 1", "time is 1", ""])
def test_other_errors_are_told_at_once(text: str) -> None:
    """Nothing that was done before is suspect."""
    assert times((6, 100))[0].clean_after(RuntimeError(text)) is None
