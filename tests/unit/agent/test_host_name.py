"""What an agent calls its host."""

from __future__ import annotations

import socket

import pytest

from rekindle.agent import process as agent


def test_a_pod_is_told_its_nodes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod the host is its node; elsewhere, or when nothing is said, the machine itself."""
    monkeypatch.setenv("REKINDLE_HOST_NAME", "node-7")
    assert agent._host_name() == "node-7"
    monkeypatch.setenv("REKINDLE_HOST_NAME", "")
    assert agent._host_name() == socket.gethostname()
    monkeypatch.delenv("REKINDLE_HOST_NAME")
    assert agent._host_name() == socket.gethostname()
