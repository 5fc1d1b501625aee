"""The recovery policy as a field of a form."""

from __future__ import annotations

from typing import Annotated

from rekindle.blocks.forms import Form
from rekindle.recovery.policy.policy import Policy

USUAL = Policy(max_restarts=3)  # of a flow's job; `rekindle run` has torchrun's default, 0

RecoveryPolicy = Annotated[Policy, Form("Policy", like=USUAL)]
