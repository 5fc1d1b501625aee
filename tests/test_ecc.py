"""Multi-bit errors of the device's memory: by its time, one says which updates are suspect."""

import pytest

from rekindle.training.ecc import UpdateTimes

# As torch-npu 2.14 and as MindIO TFT write it.
TEXTS = ("HBM MULTI BIT ECC ERROR.time is {}", "HBM MULTI BIT ECC ERROR. time us= {}.")


def times(*began: tuple[int, int]) -> UpdateTimes:
    found = UpdateTimes()
    for step, at_us in began:
        found.begin(step, at_us)
    return found


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    ("at_us", "clean"), [(301, None), (300, 7), (201, 7), (200, 6), (101, 6), (1, 5)]
)
def test_updates_from_the_error_on_are_suspect(text: str, at_us: int, clean: int | None) -> None:
    """Updates 6, 7 and 8 began at 100, 200 and 300 microseconds."""
    known = times((6, 100), (7, 200), (8, 300))
    assert known.clean_after(RuntimeError(text.format(at_us))) == clean


def test_an_update_that_is_done_again() -> None:
    """The time of the one that counts is the last one's."""
    known = times((6, 100), (7, 200), (8, 300), (7, 400))
    assert known.clean_after(RuntimeError(TEXTS[0].format(250))) == 6
    assert known.clean_after(RuntimeError(TEXTS[0].format(450))) is None


def test_an_error_that_tells_no_time() -> None:
    """It may be older than the newest update."""
    error = RuntimeError("HBM MULTI BIT ECC ERROR")
    assert times((6, 100), (7, 200)).clean_after(error) == 6
    assert times().clean_after(error) is None  # the state is from elsewhere


@pytest.mark.parametrize("text", ["UCE ERROR time is 1", "time is 1", ""])
def test_other_errors_are_told_at_once(text: str) -> None:
    """Nothing that was done before is suspect."""
    assert times((6, 100)).clean_after(RuntimeError(text)) is None
