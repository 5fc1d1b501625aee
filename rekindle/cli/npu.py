"""`rekindle npu-check`: what ranks on Ascend NPUs lack on this machine, and what to do about it."""

from __future__ import annotations

import argparse
import os

import msgspec

from rekindle.cli.terminal_output import table
from rekindle.job.ascend import ascend_environment, check_environment, survey_here
from rekindle.recovery.policy.policy import Policy


def npu_check(options: argparse.Namespace) -> int:
    """Tell all that was found; 1: ranks cannot train on NPUs here.

    Raises UsageError: a variable of HCCL's cannot be meant so.
    """
    check_environment(os.environ, Policy())
    found = survey_here()
    if options.json:
        print(msgspec.json.encode(found).decode())
    else:
        table(
            ("ranks on NPUs need", "state", "found"),
            [(each.what, "ok" if each.is_there else "missing", each.said) for each in found],
        )
        for name, value in sorted(ascend_environment(os.environ, Policy()).items()):
            print(f"ranks get {name}={value}")
        missing = [each for each in found if not each.is_there]
        if missing:  # each needs those before it
            print(f"\n{missing[0].what}:\n  {missing[0].do}")
    return 0 if all(each.is_there for each in found) else 1
