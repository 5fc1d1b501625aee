"""Forms of values, apart from the loop that keeps them."""

from __future__ import annotations

from typing import Any

import torch

from rekindle.training.torch.state.script_forms import Learned, NoForm, forms_of
from rekindle.training.torch.state.script_names import MISSING
from rekindle.training.torch.state.script_prints import Prints
from rekindle.training.torch.state.script_restore import Unpacker


def test_an_object_of_a_refused_value_has_its_form_elsewhere() -> None:
    """The refused value is not sent, so another value has the whole object."""
    entry = {"loss": 1.0}
    values: dict[str, Any] = {"a": [entry, torch.nn.Linear(1, 1)], "b": [entry], "c": entry}
    forms = forms_of(values, Learned(Prints()))
    assert isinstance(forms["a"], NoForm)
    unpacker = Unpacker(Learned(Prints()))
    second, third = (unpacker.value(forms[each], MISSING, each) for each in "bc")
    assert second == [entry]
    assert second[0] is third


def test_learning_keeps_no_graph_and_no_large_tensor_alive() -> None:
    """A script replaces its outputs in each block, and their memory must be free then."""
    learned = Learned(Prints())
    weight = torch.ones(1, requires_grad=True)
    values = {"loss": weight * 2, "large": torch.zeros(100_000), "small": torch.zeros(2)}
    learned.learn("script", values)
    assert set(learned.objects) == {"script:small"}
