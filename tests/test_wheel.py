"""What the wheel holds and how it is tagged; `make wheel-check` builds and installs one.

Hatchling is asked what it would pack, and nothing is built.
"""

import importlib.util
import re
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

import penstock

TOP = Path(__file__).parents[1]
SOURCE = TOP / "src"
RECALL = {"model.safetensors", "adapter.safetensors", "config.json", "tokenizer.json"}


@pytest.fixture(scope="module")
def builder() -> WheelBuilder:
    return WheelBuilder(str(TOP))


@pytest.fixture(scope="module")
def packed(builder: WheelBuilder) -> set[str]:
    """Paths in the wheel, without what the hook adds and without metadata."""
    return {file.distribution_path for file in builder.recurse_included_files()}


def test_the_version_is_the_packages_own_and_the_newest_of_the_changelog(
    builder: WheelBuilder,
) -> None:
    assert builder.metadata.version == penstock.__version__
    releases = re.findall(r"^## \[(\d[^\]]*)\]", (TOP / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == penstock.__version__


def test_the_wheel_has_the_package_and_all_that_it_reads(packed: set[str]) -> None:
    kept = {".py", ".c", ".h", ".toml", ".typed"}
    files = {path for path in (SOURCE / "penstock").rglob("*") if path.suffix in kept}
    assert {str(path.relative_to(SOURCE)) for path in files} <= packed
    assert {f"penstock/models/recall/{name}" for name in RECALL} <= packed
    assert "penstock/py.typed" in packed


def test_the_wheel_has_nothing_else(packed: set[str]) -> None:
    assert {path.partition("/")[0] for path in packed} == {"penstock"}
    assert {
        path for path in packed if re.search(r"/(tests|research|training|examples)/", path)
    } == set()
    # Says where the old commands went; the studies themselves are research.
    assert {path for path in packed if "/bench/" in path} == {"penstock/bench/__init__.py"}
    # A library that lies in the checkout may be of older sources: the hook alone adds one.
    assert {path for path in packed if path.endswith((".so", ".dylib", ".dll", ".pyc"))} == set()


def test_the_licence_goes_along(builder: WheelBuilder) -> None:
    assert builder.metadata.core.license_files == ["LICENSE"]
    assert builder.metadata.core.license_expression == "Apache-2.0"


@pytest.fixture
def hook() -> ModuleType:
    """The build hook, which is no module of the package."""
    spec = importlib.util.spec_from_file_location("hatch_build", TOP / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_data(hook: ModuleType, builder: WheelBuilder) -> dict[str, Any]:
    """What the hook makes of a wheel's build."""
    made: dict[str, Any] = {"pure_python": True, "artifacts": []}
    arguments: tuple[Any, ...] = (str(TOP), {}, builder.config, builder.metadata, "", "wheel")
    hook.CompiledKernels(*arguments).initialize("standard", made)
    return made


def test_a_wheel_with_the_library_is_for_this_platform_and_any_python(
    hook: ModuleType, builder: WheelBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "compile_kernels", lambda: hook.FOLDER / "kernels.so")
    made = build_data(hook, builder)
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    assert made["tag"] == f"py3-none-{platform}"
    assert made["artifacts"] == ["/src/penstock/kernels/native/kernels.so"]
    assert not made["pure_python"]


def test_a_wheel_without_the_library_is_for_every_platform(
    hook: ModuleType, builder: WheelBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "compile_kernels", lambda: None)
    assert build_data(hook, builder) == {"pure_python": True, "artifacts": []}
