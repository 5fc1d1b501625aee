"""The silence of a peer: it is asked, then lost, but not because this process was stopped."""

from __future__ import annotations

from rekindle.silence import MOST_GRACE_S, Reaction, Silence


def silence() -> Silence:
    return Silence(ask_after=3, lost_after=5, every_s=1.0)


def test_a_silent_peer_is_asked_and_then_lost() -> None:
    """Each verdict comes once, after its number of checks."""
    peer = silence()
    found = [peer.check(0.0) for _ in range(6)]
    wait = Reaction.WAIT
    assert found == [wait, wait, Reaction.ASK, wait, Reaction.LOST, wait]


def test_a_message_begins_the_count_again() -> None:
    peer = silence()
    for _ in range(20):
        assert [peer.check(0.0) for _ in range(2)] == [Reaction.WAIT] * 2
        peer.note_message()


def test_after_a_gap_the_peer_has_as_much_time_again() -> None:
    """A machine that was suspended judges no peer by the time of the suspension."""
    peer = silence()
    for _ in range(4):
        peer.check(0.0)
    checks = 0
    verdict = peer.check(10.0)
    while verdict is not Reaction.LOST:
        verdict, checks = peer.check(0.0), checks + 1
    assert checks == 10 + 5 - 1


def test_the_grace_has_a_limit() -> None:
    """After a gap of hours a lost peer is still found."""
    peer = silence()
    peer.check(36_000.0)
    found = [peer.check(0.0) for _ in range(int(MOST_GRACE_S) + 5)]
    assert found.count(Reaction.LOST) == 1
