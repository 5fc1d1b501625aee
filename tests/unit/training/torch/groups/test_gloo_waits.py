"""Gloo's result on a GPU, if the backward pass runs in another stream than the default one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rekindle.training.torch.groups.gloo_waits import reduce_bucket


class Stream:
    """A stream that records which stream it waits for."""

    def __init__(self, name: str, waited: list[tuple[str, str]]) -> None:
        self.name, self._waited = name, waited

    def wait_stream(self, other: Stream) -> None:
        self._waited.append((self.name, other.name))


@pytest.mark.parametrize(("kind", "waits"), [("cuda", [("backward", "default")]), ("cpu", [])])
def test_the_stream_of_the_backward_pass_waits_for_gloos_copy(
    monkeypatch: pytest.MonkeyPatch, kind: str, waits: list[tuple[str, str]]
) -> None:
    """On a GPU, the stream of the backward pass waits for gloo's copy before DDP continues.

    Without that, DDP used the gradients too early, and the ranks differed without an error.
    """
    waited: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("backward", waited))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: Stream("default", waited))
    bucket: Any = SimpleNamespace(
        buffer=lambda: SimpleNamespace(device=torch.device(kind)), index=lambda: 0
    )
    theirs: torch.futures.Future[Any] = torch.futures.Future()
    ours = reduce_bucket([(lambda *_: theirs, None)], bucket)
    seen: list[list[tuple[str, str]]] = []
    ours.add_done_callback(lambda _: seen.append(list(waited)))
    assert waited == []
    reduced = torch.ones(2)
    theirs.set_result([reduced])
    assert ours.wait() is reduced
    assert seen == [waits]  # before DDP learns that the bucket is reduced
