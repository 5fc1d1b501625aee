"""The connection of a rank to the ranks' store."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from rekindle.recovery.faults.fault import FaultKind
from rekindle.training.torch.faults.repairs import kind_of
from rekindle.training.torch.groups import generation_group
from rekindle.training.torch.groups.generation_group import KEY_S, store_at

pytestmark = pytest.mark.process


def test_a_store_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank does not wait for torch's 300 s, and the failure counts as one of the network."""
    monkeypatch.setattr(generation_group, "STORE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(dist.DistNetworkError) as caught:
        store_at("127.0.0.1", port)
    assert kind_of(caught.value) is FaultKind.LINK


def test_a_store_that_answers() -> None:
    """The limit of the connection is not that of the keys, for which a rank waits later."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert store_at("127.0.0.1", host.port).timeout.total_seconds() == KEY_S
