"""Answers of webhooks for objects that refer to missing objects."""

from __future__ import annotations

import pytest

pytest.importorskip("kubernetes.client")
from rekindle.engines.kubernetes.preflight.preflight import is_premature

_DENIED = 'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: '


@pytest.mark.parametrize(
    ("text", "premature"),
    [
        ("specified trainingRuntime must be created before the TrainJob is created", True),
        ("runtime 'demo' not found", True),
        ("spec.trainer.numProcPerNode: Invalid value: must be auto, cpu, gpu, or int", False),
    ],
)
def test_a_runtime_that_is_not_there_yet(text: str, premature: bool) -> None:
    """A missing runtime is not a fault of the TrainJob; every other refusal is."""
    assert is_premature(_DENIED + text) is premature
