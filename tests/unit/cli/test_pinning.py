"""`rekindle checkpoints pin` and `unpin`."""

from __future__ import annotations

import json
import time

import pytest
from checkpoint_commands import Checkpoints, place

from rekindle.checkpoints.directory import DirectoryStore
from rekindle.checkpoints.pins import Pin


def test_what_is_pinned_stays(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """`prune` keeps a pinned checkpoint, `ls` shows the pin, and `unpin` removes it."""
    assert "pinned until it is unpinned (user)" in checkpoints("pin", "store", 5).out
    assert "complete, pinned (user)" in checkpoints("ls", "store").out
    found = json.loads(checkpoints("ls", "store", "--json").out)
    assert [(each["step"], each["pins"]) for each in found] == [(15, []), (10, []), (5, ["user"])]
    assert "10" in checkpoints("prune", "store", "--keep", 1).out
    assert [key[0] for key in store.keys()] == [15, 5]  # noqa: SIM118
    assert "no longer pinned" in checkpoints("unpin", "store", 5).out
    checkpoints("prune", "store", "--keep", 1)
    assert [key[0] for key in store.keys()] == [15]  # noqa: SIM118


def test_for_some_hours(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """A pin can expire, and each name is a separate pin."""
    before = time.time()
    shown = checkpoints("pin", "store", 10, "--hours", 1.5, "--name", "eval").out
    after = time.time()
    assert "pinned until 20" in shown
    checkpoints("pin", "store", 10, "--name", "paper")
    [one, other] = sorted(store.pins(), key=lambda pin: pin.name)
    assert (one.name, other) == ("eval", Pin((10, 0), "paper"))
    assert one.until is not None
    assert int(before) <= one.until - 1.5 * 3600 <= after + 1
    checkpoints("pin", "store", 10, "--name", "eval")
    one = Pin((10, 0), "eval")
    assert sorted(store.pins(), key=lambda pin: pin.name) == [one, other]
    assert "no longer pinned (paper)" in checkpoints("unpin", "store", 10, "--name", "paper").out
    assert store.pins() == [one]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("pin", "store", 7), 2, "has no checkpoint of step 7"),
        (("pin", "store", 5, "--name", "a/b"), 1, "not a valid name of a pin"),
        (("pin", "store", 5, "--hours", 0), 2, "give a number above 0"),
        (("pin", "store", 5, "--hours", "nan"), 2, "give a number above 0"),
        (("pin", "store", 5, "--hours", "1e9"), 2, "at most 87840"),
        (("pin", "nothing", 5), 2, "there is no folder"),
        (("unpin", "store", 5), 2, "no pin with the name 'user'"),
    ],
)
def test_what_cannot_be_meant(
    words: tuple[object, ...],
    status: int,
    text: str,
    store: DirectoryStore,
    checkpoints: Checkpoints,
) -> None:
    """A wrong command prints the reason, and pins nothing."""
    done = checkpoints(*words)
    assert done.status == status
    assert text in done.err
    assert store.pins() == []


def test_what_is_not_complete(store: DirectoryStore, checkpoints: Checkpoints) -> None:
    """`pin` refuses an incomplete checkpoint."""
    victim = next(place(store, 10).glob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:100])
    done = checkpoints("pin", "store", 10)
    assert done.status == 1
    assert "g000000: state-00000.safetensors has 100 bytes" in done.err
