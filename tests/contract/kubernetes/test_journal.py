"""Test the journal of the simulated server, and the selection of kinds."""

from __future__ import annotations

from pathlib import Path

from cluster import kinds
from cluster.operations import Operations
from cluster.store import Store


def test_what_was_written_is_there_again(tmp_path: Path) -> None:
    """A restarted store has the same objects and versions.

    It ignores an incomplete last line and overwrites it.
    """
    journal = tmp_path / "state"
    store = Store(kinds.KINDS, journal)
    operations = Operations(store)
    operations.create(kinds.NAMESPACES, "", {"metadata": {"name": "a"}})
    made = operations.create(kinds.CONFIGMAPS, "a", {"metadata": {"name": "m"}, "data": {"x": "1"}})
    store.close()
    with journal.open("ab") as file:
        file.write(b'[99,"configmaps",["a","torn"],{"meta')
    again = Store(kinds.KINDS, journal)
    assert again.get(kinds.CONFIGMAPS, "a", "m") == made
    assert again.version == int(made["metadata"]["resourceVersion"]) == again.oldest
    Operations(again).create(kinds.CONFIGMAPS, "a", {"metadata": {"name": "n"}})
    again.close()
    third = Store(kinds.KINDS, journal)
    assert [each["metadata"]["name"] for each in third.all(kinds.CONFIGMAPS)] == ["m", "n"]
    third.close()


def test_kinds_that_are_left_out_are_forgotten_by_name() -> None:
    """`choose` leaves out custom kinds by name. A core kind with the same plural stays."""
    left = kinds.choose("jobs.batch.volcano.sh,jobsets")
    assert kinds.JOBS in left
    assert kinds.VOLCANOJOBS not in left
    assert kinds.JOBSETS not in left
