"""Facts about a job's script that an agent reads before it starts ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from jobs.driver import spec_of

from rekindle.agent.rank_process import names_session
from rekindle.job.spec import EntryKind

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
def test_a_script_that_names_rekindle(
    tmp_path: Path, entry: EntryKind, target: str, file: str, text: str, expected: bool
) -> None:
    """The text of a script or module shows whether it uses Rekindle; nothing is imported."""
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    spec = msgspec.structs.replace(
        spec_of(nodes=1, processes=1), entry=entry, target=target, working_directory=str(tmp_path)
    )
    assert names_session(spec) is expected
