"""What every test needs before the first module is imported."""

import functools
import gc
import os
import random
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.choose_slow import mark_slow

if TYPE_CHECKING:
    from torch import Tensor

# What imports and collection made stays to the end: each full collection would walk it again.
gc.disable()

# Read by huggingface_hub at its import: tests ask no hub but their own.
os.environ["HF_HUB_OFFLINE"] = "1"

for name in ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)  # whoever runs the tests may like colours; tests read plain text
for name in [each for each in os.environ if each.startswith("PENSTOCK_")]:
    if name != "PENSTOCK_KERNELS":
        del os.environ[name]  # and has settings, which no test is about
os.environ["PENSTOCK_CONFIG"] = os.devnull

LONG = (
    "training", "research", "evaluate", "tuner", "cli", "search", "documents", "models", "kernels",
    "methods", "storage",
)  # fmt: skip


def _prepare() -> None:
    """What every test needs before the first module is imported."""
    import torch
    import typer.testing
    from hypothesis import HealthCheck, settings

    from penstock.kernels.native import compiled

    # No example is refused for being slow: the machine may be at something else meanwhile. What the
    # default profile says otherwise stays (where CI is set: the same examples each time).
    settings.register_profile(
        "penstock",
        settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]),
    )
    settings.load_profile("penstock")
    compiled.limit(os.environ.get("PENSTOCK_KERNELS", "auto"))  # the whole suite under one level
    runner: Any = typer.testing  # makes all commands anew each time
    runner._get_command = functools.cache(runner._get_command)
    system: Any = os  # no power cut is tested: what must be synced, tests see by the calls
    system.fsync = system.fdatasync = _synced
    if not torch.cuda.is_available():
        # Kernels in Triton run in its interpreter. It must be told before anything imports Triton,
        # which transformers does, so that this stands above the tests of the kernels.
        os.environ["TRITON_INTERPRET"] = "1"


def _synced(descriptor: int) -> None:
    os.fstat(descriptor)


# The process that starts xdist's workers runs no test. They wait until it has imported what it
# will: two seconds less without torch.
RUNS_TESTS = "PYTEST_XDIST_WORKER" in os.environ or not any(
    word.startswith(("-n", "--numprocesses")) for word in sys.argv
)
if RUNS_TESTS:
    _prepare()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `tests/matrix.py` runs the suite with, for the machine that it has not got."""
    group = parser.getgroup("penstock")
    group.addoption("--shuffle", type=int, metavar="SEED", help="Run the files in another order.")
    group.addoption("--other-sums", type=int, metavar="SEED", help="Round products otherwise.")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist would begin with the files of the most tests
    seed: int | None = config.getoption("other_sums")
    if seed is not None and RUNS_TESTS:
        import torch

        torch.nn.functional.linear = _rounded_otherwise(torch.nn.functional.linear, seed)


@pytest.hookimpl(tryfirst=True)  # before marks are asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow(items)
    seed: int | None = config.getoption("shuffle")
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = list(files)
    if seed is None:
        order.sort(key=lambda path: (not _is_long(path), -len(files[path])))
    else:
        random.Random(seed).shuffle(order)
    items[:] = [item for path in order for item in files[path]]


def _is_long(path: Path) -> bool:
    """Whether single tests of a file may take seconds: begun last, one would run beside nothing."""
    parts = path.relative_to(Path(__file__).parent).parts
    return len(parts) == 1 or parts[0] in LONG


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _rounded_otherwise(linear: "Callable[..., Tensor]", seed: int) -> "Callable[..., Tensor]":
    """A `linear` of a processor that adds up in another order: some results lie one step beside.

    Which ones follows from the seed and the shapes, as a processor chooses its loops by shape.
    """

    import torch

    def other(input: "Tensor", weight: "Tensor", bias: "Tensor | None" = None) -> "Tensor":
        found = linear(input, weight, bias)
        if found.device.type != "cpu" or not found.is_floating_point():
            return found
        chance = torch.Generator().manual_seed(hash((seed, *input.shape, *weight.shape)) % 2**63)
        factors = torch.ones_like(found, requires_grad=False).detach()
        step = torch.finfo(found.dtype).eps
        factors += step * torch.empty_like(factors).bernoulli_(1 / 16, generator=chance)
        return found * factors

    return other


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same draws for a test, whoever ran before it."""
    import numpy as np
    import torch

    seed = zlib.crc32(item.nodeid.encode())
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.fixture(scope="module", autouse=True)
def _settled_heap() -> None:
    """Collections look only at what a module's tests made, not at all of torch and transformers.

    Benchmarks collect before each figure of memory; what lives already is no test's garbage.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2_home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where SmolLM2-135M-Instruct is, as its GGUF file and as a folder; see `tests/pretrained.py`.

    Made once in this checkout, for all workers and runs. Skips where it cannot be had.
    """
    from tests.pretrained import NotThere, smollm2

    of_run = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        of_run = of_run.parent  # of all workers
    cache = getattr(request.config, "cache", None)
    reason = of_run / "smollm2-is-not-there"
    if reason.exists():  # another worker has asked
        pytest.skip(reason.read_text())
    try:
        return smollm2(of_run if cache is None else cache.mkdir("smollm2"))
    except NotThere as error:
        reason.write_text(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_home: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in bfloat16, with its chat template."""
    from tests.pretrained import FOLDER

    return smollm2_home / FOLDER
