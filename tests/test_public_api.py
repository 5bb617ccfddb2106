"""The public surface: complete, sorted, documented, and quick to import."""

import inspect
import subprocess
import sys

import pytest

import penstock


def isort_key(name: str) -> tuple[int, str]:
    """Constants first, then classes, then the rest: ruff's order for `__all__`."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


def test_all_is_sorted_and_has_no_name_twice() -> None:
    assert penstock.__all__ == sorted(set(penstock.__all__), key=isort_key)


def test_dir_is_all() -> None:
    assert dir(penstock) == sorted(penstock.__all__)


def test_every_name_is_there_and_documented() -> None:
    values = {name: getattr(penstock, name) for name in penstock.__all__}
    classes = {name: value for name, value in values.items() if inspect.isclass(value)}
    assert classes
    assert [name for name, value in classes.items() if not inspect.getdoc(value)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KVSwop'"):
        penstock.KVSwop  # noqa: B018


def test_policies_are_policies() -> None:
    assert {"kvswap", "full", "flexgen"} <= set(penstock.POLICIES)
    for policy in penstock.POLICIES.values():
        assert issubclass(policy, penstock.SelectionPolicy)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, penstock; print({'torch', 'transformers', 'typer'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
