"""Facts about a job's script that an agent reads before it starts ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from jobs.driver import spec_of

from rekindle.agent.rank_process import names_session
from rekindle.job.spec import EntryKind, JobSpec

WITH = "from rekindle.training.torch import Session\n"
WITHOUT = "import torch.distributed as dist\n"


@pytest.mark.parametrize(
    ("entry", "target", "file", "text", "expected"),
    [
        (EntryKind.SCRIPT, "train.py", "train.py", WITH, True),
        (EntryKind.SCRIPT, "train.py", "train.py", "import mindio_ttp\n", True),
        (EntryKind.SCRIPT, "train.py", "train.py", WITHOUT, False),
        (EntryKind.SCRIPT, "train.py", "other.py", WITH, False),
        (EntryKind.MODULE, "package.train", "package/train.py", WITH, True),
        (EntryKind.MODULE, "package", "package/__main__.py", WITH, True),
        (EntryKind.MODULE, "package.train", "package/train.py", WITHOUT, False),
        (EntryKind.PROGRAM, "train.py", "train.py", WITH, False),
    ],
)
def test_a_script_that_imports_rekindle(
    tmp_path: Path, entry: EntryKind, target: str, file: str, text: str, expected: bool
) -> None:
    """The text of a script or module shows whether it uses Rekindle; nothing is imported."""
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert names_session(spec_in(tmp_path, entry, target)) is expected


def spec_in(folder: Path, entry: EntryKind, target: str) -> JobSpec:
    """Return the spec of a job that runs this target in a folder."""
    return msgspec.structs.replace(
        spec_of(nodes=1, processes=1), entry=entry, target=target, working_directory=str(folder)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import rekindle\n", True),
        ("import os, rekindle.training.torch as rekindle_torch\n", True),
        ("import os; from rekindle import retry_condition\n", True),
        ("from mindio_ttp.framework_ttp import tft_init\n", True),
        ("def main():\n    from rekindle.training.torch import (\n        Session,\n    )\n", True),
        ("try: import mindio_ttp\nexcept ImportError: pass\n", True),
        ("import \\\n    rekindle\n", True),
        ("# -*- coding: latin-1 -*-\nname = '\xe9'\nimport rekindle\n", True),
        ("import rekindle\n(", True),
        ("# run with: rekindle run train.py\nimport torch\n", False),
        ("# import rekindle\n", False),
        ('"""Use:\n\nfrom rekindle.training.torch import Session\n"""\n', False),
        ('text = f"""\nimport rekindle\n"""\n', False),
        ("import rekindle_tools, os.rekindle, torch as rekindle\n", False),
        ("from tools import rekindle, mindio_ttp\n", False),
        ("from .rekindle import train\n", False),
        ("raise ValueError from rekindle\n", False),
        ("(\nimport rekindle\n", False),
        ("rekindle = '\n", False),
        ("# -*- coding: rekindle -*-\n", False),
        ("rekindle\0\n", False),
    ],
)
def test_only_an_import_shows_that_a_script_uses_rekindle(
    tmp_path: Path, text: str, expected: bool
) -> None:
    """Comments and texts show nothing, and a text that Python cannot read stops nothing."""
    (tmp_path / "train.py").write_bytes(text.encode("latin-1"))
    assert names_session(spec_in(tmp_path, EntryKind.SCRIPT, "train.py")) is expected
