"""The collection of unit tests imports slow libraries only where tests use them."""

from __future__ import annotations

from suite.heavy_imports import HEAVY, heavy_imports

_CLUSTER = {"kubernetes", "urllib3"}
ALLOWED = {  # the libraries that the tests of a folder, or a file, are about
    "engines/kubernetes/": _CLUSTER,
    "engines/kubernetes/test_deploy.py": {"prefect"},
    "reporting/": {"matplotlib"},
    "tasks/": {"prefect"},
    "test_documentation.py": {"prefect", *_CLUSTER},  # the generated pages about forms and clusters
}


def test_slow_libraries_are_imported_where_they_are_tested() -> None:
    """A unit test that needs no Prefect, Kubernetes, S3 or picture does not wait for its import."""
    found = {
        path: more
        for path, libraries in heavy_imports().items()
        if (more := libraries - _allowed(path))
    }
    assert not found, "import them, or what imports them, in the test that needs them"


def test_the_search_finds_such_imports() -> None:
    """The search follows the imports of modules and finds every allowed library except S3's."""
    found = heavy_imports()
    assert set().union(*found.values()) == HEAVY - {"boto3", "botocore"}
    for place, libraries in ALLOWED.items():
        here = set().union(*(found[path] for path in found if path.startswith(place)))
        assert libraries <= here, f"{place} no longer needs {libraries - here}"


def _allowed(path: str) -> set[str]:
    return set().union(*(ALLOWED[place] for place in ALLOWED if path.startswith(place)))
