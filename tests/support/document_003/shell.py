"""The shell lines of document 003, and the command of Rekindle for them."""

from __future__ import annotations

import shlex
from typing import NamedTuple

LINES = """
export MS_ENABLE_TFT='{UCE:1 TTP:1}'
export MINDIO_FOR_MINDSPORE=1
export DATA_PATH=${EXEC_PATH}/MNIST_DATA/train/
msrun --worker_num=4 --local_worker_num=4 --master_port=10970 --join=False --log_dir=./uce_logs \
UCE_case.py
"""
# --worker_num and --local_worker_num become --nproc-per-node, and --log_dir becomes --log-dir. Each
# start of `rekindle run` has a new port, and the command always waits.
OPTIONS = {"--worker_num", "--local_worker_num", "--master_port", "--join", "--log_dir"}


class Command(NamedTuple):
    """The contents of the lines. ranks: of the whole job."""

    environment: dict[str, str]
    ranks: int
    log_directory: str
    script: str


def command_of(lines: str, execution_path: str) -> Command:
    """Return what shell lines with `export` and one `msrun` ask for."""
    environment, given = {}, {}
    for line in lines.replace("${EXEC_PATH}", execution_path).strip().splitlines():
        first, *words = shlex.split(line)
        if first == "export":
            name, _, value = words[0].partition("=")
            environment[name] = value
        else:
            assert first == "msrun"
            given = dict(word.split("=", 1) for word in words[:-1])
    assert given.keys() == OPTIONS
    assert given["--worker_num"] == given["--local_worker_num"]  # one machine
    return Command(environment, int(given["--worker_num"]), given["--log_dir"], words[-1])
