"""Strategic merge patches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engines.kubernetes.manifests.strategic_merge import merge
from rekindle.errors import UsageError

scalars = st.one_of(st.integers(0, 3), st.text("xy", max_size=2), st.booleans())
named = st.builds(
    lambda name, value: {"name": name, "value": value}, st.sampled_from("abc"), scalars
)
env = st.lists(named, max_size=3, unique_by=lambda one: one["name"])
args = st.lists(scalars, max_size=3)
leaves = st.fixed_dictionaries({}, optional={"env": env, "args": args, "image": scalars})
trees = st.fixed_dictionaries({}, optional={"spec": leaves, "metadata": leaves, "extra": scalars})
removals = st.fixed_dictionaries(
    {}, optional={"spec": st.none(), "metadata": st.just({"$patch": "delete"}), "extra": scalars}
)


@given(trees)
def test_an_empty_patch_changes_nothing(manifest: dict[str, Any]) -> None:
    """An empty patch, or a patch with the existing values, does not change the manifest."""
    assert merge(manifest, {}) == manifest
    assert merge(manifest, manifest) == manifest


@given(trees, st.one_of(trees, removals))
def test_twice_is_once(manifest: dict[str, Any], patch: dict[str, Any]) -> None:
    """A second equal patch has no effect, and merge() does not change its arguments."""
    before = copy.deepcopy((manifest, patch))
    once = merge(manifest, patch)
    assert merge(once, patch) == once
    assert (manifest, patch) == before


TRAINING: dict[str, Any] = {
    "name": "training",
    "image": "a",
    "command": ["run", "x"],
    "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
    "ports": [{"containerPort": 1, "name": "one"}],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
}
POD: dict[str, Any] = {
    "spec": {
        "containers": [TRAINING, {"name": "side", "image": "b"}],
        "tolerations": [{"key": "old"}],
        "nodeSelector": {"pool": "a"},
    }
}


@pytest.mark.parametrize(
    ("patch", "where", "expected"),
    [
        ({"containers": [{"name": "side", "image": "c"}]}, ("containers", 1, "image"), "c"),
        (
            {"containers": [{"name": "side", "image": "c"}]},
            ("containers", 0),
            POD["spec"]["containers"][0],
        ),
        ({"containers": [{"name": "new"}]}, ("containers", 2), {"name": "new"}),
        (
            {"containers": [{"name": "side", "$patch": "delete"}]},
            ("containers",),
            [TRAINING],
        ),
        (
            {"containers": [{"$patch": "replace"}, {"name": "only"}]},
            ("containers",),
            [{"name": "only"}],
        ),
        (
            {"containers": [{"name": "training", "env": [{"name": "B", "value": "3"}]}]},
            ("containers", 0, "env"),
            [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}],
        ),
        (
            {"containers": [{"name": "training", "ports": [{"containerPort": 1, "name": "uno"}]}]},
            ("containers", 0, "ports"),
            [{"containerPort": 1, "name": "uno"}],
        ),
        (
            {
                "containers": [
                    {
                        "name": "training",
                        "volumeMounts": [{"mountPath": "/data", "readOnly": True}],
                    }
                ]
            },
            ("containers", 0, "volumeMounts"),
            [{"name": "data", "mountPath": "/data", "readOnly": True}],
        ),
        (
            {"containers": [{"name": "training", "command": ["other"]}]},
            ("containers", 0, "command"),
            ["other"],
        ),
        ({"tolerations": [{"key": "new"}]}, ("tolerations",), [{"key": "new"}]),
        ({"nodeSelector": {"zone": "b"}}, ("nodeSelector",), {"pool": "a", "zone": "b"}),
        (
            {"nodeSelector": {"$patch": "replace", "zone": "b"}},
            ("nodeSelector",),
            {"zone": "b"},
        ),
        ({"nodeSelector": {"pool": None}}, ("nodeSelector",), {}),
        (
            {"volumes": [{"name": "a", "emptyDir": {}}]},
            ("volumes",),
            [{"name": "a", "emptyDir": {}}],
        ),
        ({"dnsConfig": {"a": {"b": None, "c": 1}}}, ("dnsConfig",), {"a": {"c": 1}}),
    ],
)
def test_lists_are_merged_by_their_key(
    patch: dict[str, Any], where: tuple[Any, ...], expected: Any
) -> None:
    """Lists of named items keep items that the patch does not name; it replaces other lists."""
    found: Any = merge(POD, {"spec": patch})["spec"]
    for key in where:
        found = found[key]
    assert found == expected


def test_a_field_is_removed() -> None:
    """A null, or `$patch: delete` in a map, removes the field."""
    assert merge(POD, {"spec": {"tolerations": None}})["spec"].keys() == {
        "containers",
        "nodeSelector",
    }
    assert (
        "nodeSelector" not in merge(POD, {"spec": {"nodeSelector": {"$patch": "delete"}}})["spec"]
    )


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        ({"spec": []}, "the patch has a list at spec, but the manifest has a map; write a map"),
        ({"spec": "x"}, "the patch has the value 'x' at spec, but the manifest has a map"),
        (
            {"spec": {"containers": {"name": "training"}}},
            "the patch has a map at spec.containers, but the manifest has a list; write a list",
        ),
        (
            {"spec": {"containers": [{"image": "x"}]}},
            r"the patch has no name at spec.containers\[0\], so it does not identify an item",
        ),
        (
            {"spec": {"containers": ["training"]}},
            r"the patch has the value 'training' at spec.containers\[0\]; write a map with name",
        ),
        (
            {"spec": {"containers": [{"name": "training", "image": {"a": 1}}]}},
            r"a map at spec.containers\[name=training\].image, but the manifest has the value 'a'",
        ),
        (
            {"spec": {"nodeSelector": {"$patch": "remove"}}},
            r"\$patch: remove at spec.nodeSelector is unknown; write delete or replace",
        ),
        ({"$patch": "delete"}, r"\$patch: delete at the top would remove everything; name a field"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused_with_its_place(
    patch: dict[str, Any], text: str
) -> None:
    """The error has the place, the existing value and the remedy."""
    with pytest.raises(UsageError, match=text):
        merge(POD, patch)
