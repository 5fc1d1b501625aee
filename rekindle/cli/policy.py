"""`rekindle policy`: read a policy, and print it."""

from __future__ import annotations

import argparse
from pathlib import Path

from rekindle.recovery.policy.policy_file import PolicyFormat, read_policy, write_policy


def show(options: argparse.Namespace) -> int:
    """Print the policy in the format of the option."""
    print(write_policy(read_policy(Path(options.file)), PolicyFormat(options.to)), end="")
    return 0
