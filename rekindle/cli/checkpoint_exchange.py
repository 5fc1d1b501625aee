"""`rekindle checkpoints export` and `import`: to and from what torch itself reads and writes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from rekindle.cli.open_store import chosen, open_at
from rekindle.cli.table import size
from rekindle.errors import UsageError
from rekindle.job.spec import check_job_id


def export_state(options: argparse.Namespace) -> int:
    """Write a checkpoint's state for torch."""
    from rekindle.training.torch.convert import exporting, whole

    out = Path(options.out).absolute()
    exporting.check_out(out)
    with chosen(options.store, options.step) as checkpoint:
        step = checkpoint.manifest.step
        states, skeleton = whole.read_states(checkpoint, options.only or ())
    if options.format == "torch":
        exporting.save_torch(states, step, out)
    else:
        exporting.save_dcp(states, step, skeleton, out)
    print(f"step {step}: {', '.join(states)}: {out}")
    return 0


def import_state(options: argparse.Namespace) -> int:
    """Make a checkpoint of what torch has written."""
    from rekindle.training.torch.convert import importing

    check_job_id(options.job_id)
    source = Path(options.source).absolute()
    if not source.exists():
        raise UsageError(f"there is no file or folder {source}")
    store = open_at(options.store, exists=False)
    take = dict(_pair("--take", each) for each in options.take)
    add = {name: _json(name, text) for name, text in (_pair("--add", e) for e in options.add)}
    imported = importing.read_source(source, take=take, add=add, device=options.device)
    step = imported.step if options.step is None else options.step
    if step is None or step < 0:
        raise UsageError(f"{source} does not tell how many steps are finished: say --step N")
    written = importing.write(imported, store, job_id=options.job_id, step=step)
    if imported.left_out:
        print(f"rekindle: left out: {', '.join(imported.left_out)}", file=sys.stderr)
    verb = "was there already" if written.existed else "imported"
    names = ", ".join(imported.tree)
    print(f"step {step}, {size(written.bytes)}: {verb}: {names}: {written.location}")
    return 0


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise UsageError(f"{option} {text!r}: give NAME=..., such as model=net")
    return name, value


def _json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise UsageError(f"--add {name}={text}: that is no JSON: {error}") from error
