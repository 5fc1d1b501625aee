"""The host name that an agent reports."""

from __future__ import annotations

import socket

import pytest

from rekindle.agent import process as agent


def test_a_pod_is_told_its_nodes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent reports REKINDLE_HOST_NAME; if that is empty or missing, the machine's own name."""
    monkeypatch.setenv("REKINDLE_HOST_NAME", "node-7")
    assert agent._host_name() == "node-7"
    monkeypatch.setenv("REKINDLE_HOST_NAME", "")
    assert agent._host_name() == socket.gethostname()
    monkeypatch.delenv("REKINDLE_HOST_NAME")
    assert agent._host_name() == socket.gethostname()
