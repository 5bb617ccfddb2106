"""A tiny model with random weights, and tuning tasks for it."""

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest

from penstock.devices.presets import NVME
from penstock.engine.adapter import LowRankAdapter
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import settings_of
from penstock.models.loader import LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import random_adapter, random_model
from penstock.tuner import candidates, kvswap_search, tuning_task
from penstock.tuner.candidates import Candidate, PaperTables
from penstock.tuner.journal import Journal
from penstock.tuner.prefill_profile import PrefillProfile
from penstock.tuner.tuning_task import TuningTask

MakeTask = Callable[..., TuningTask]
SOME = [*settings_of(KVSwap)][::10]
LISTED: dict[Hashable, tuple[list[Candidate], int | None]] = {}


@pytest.fixture(autouse=True, scope="module")
def _listed_once() -> Iterator[None]:
    """Searches of the same task, of which each file has many, list what fits once."""
    whole = candidates.candidates

    def listed(*about: Any, **asked: Any) -> tuple[list[Candidate], int | None]:
        key = (vars(candidates)["settings_of"], *about, *asked.items())
        if key not in LISTED:
            LISTED[key] = whole(*about, **asked)
        found, least = LISTED[key]
        return [*found], least

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kvswap_search, "candidates", listed)
        yield


def some_settings(_: object) -> list[Any]:
    """Every tenth of KVSwap's."""
    return SOME


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """Three layers, two KV heads of 64, bfloat16."""
    model = random_model("tiny", max_positions=8192)
    return LoadedModel(model=model, tokenizer=None, name="tiny")


@pytest.fixture(scope="session")
def tiny_adapter(tiny: LoadedModel) -> LowRankAdapter:
    return random_adapter(tiny.model)


@pytest.fixture(scope="session")
def make_task(tiny: LoadedModel, tiny_adapter: LowRankAdapter) -> MakeTask:
    """A task with the paper's tables, in memory, a third of the full cache; fields can be given."""
    shape = inspect_model(tiny.model).kv

    def make(**fields: Any) -> TuningTask:
        batch, context = fields.get("max_batch", 1), fields.get("max_context", 2048)
        settings: dict[str, Any] = {
            "loaded": tiny, "adapter": tiny_adapter, "text": None, "store": "memory",
            "tables": PaperTables(joint_dim=shape.joint_dim), "device": NVME, "floor": 0.1,
            "prefill": PrefillProfile(1e-4, 1e-9), "max_context": context, "max_batch": batch,
            "limit_bytes": shape.full_cache_bytes(batch, context) // 3,
        }  # fmt: skip
        return TuningTask(**{**settings, "journal": Journal(None, {}), **fields})

    return make


@pytest.fixture
def gridded(monkeypatch: pytest.MonkeyPatch, make_task: MakeTask) -> MakeTask:
    """Tasks over two lengths and two batches."""
    monkeypatch.setattr(tuning_task, "SHORTEST_CONTEXT", 2048)
    return lambda **fields: make_task(**{"max_context": 4096, "max_batch": 2, **fields})


@pytest.fixture
def sparse(gridded: MakeTask, monkeypatch: pytest.MonkeyPatch) -> MakeTask:
    """The same grid with every tenth setting, where it does not matter which ones there are."""
    monkeypatch.setattr(candidates, "settings_of", some_settings)
    return gridded
