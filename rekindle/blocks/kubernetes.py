"""The pods of a job as a field of a form."""

from __future__ import annotations

from typing import Annotated

from rekindle.blocks.forms import Form
from rekindle.engines.kubernetes.manifests.settings import Pods
from rekindle.engines.kubernetes.manifests.validation import check_words

KubernetesPods = Annotated[Pods, Form("Kubernetes", check_words)]
