"""Set up the demo's own folder, and the environment that keeps its files there."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "demo-output"
PREFECT_HOME = OUTPUT / "prefect"
REPORT = "demo-report.json"
SCRIPT = ROOT / "examples" / "charlm" / "train.py"
_OURS = OUTPUT / ".gitignore"


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


PORT = free_port()
UI = f"http://127.0.0.1:{PORT}"


def set_environment() -> None:
    """Make Prefect and Rekindle use the demo's folder, here and in all processes of the demo."""
    for name in list(os.environ):
        if name.startswith(("PREFECT_", "REKINDLE_", "TORCHELASTIC_")):
            del os.environ[name]
    os.environ |= {
        "PREFECT_HOME": str(PREFECT_HOME),
        "PREFECT_API_URL": f"{UI}/api",
        "PREFECT_SERVER_UI_API_URL": f"{UI}/api",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "REKINDLE_HOME": str(OUTPUT / "rekindle"),
    }


def empty_output() -> None:
    """Empty the demo's folder. Raises SystemExit: the demo has not made the folder."""
    if OUTPUT.exists():
        if not _OURS.exists():
            raise SystemExit(f"{OUTPUT} exists and is not of this demo; move it away")
        shutil.rmtree(OUTPUT)
    OUTPUT.mkdir()
    _OURS.write_text("# Made by the demo, which also removes it.\n*\n")
