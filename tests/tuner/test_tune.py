"""tune(): from a model and a budget to a config that runs; interruptions, refusals, quality."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import penstock
from penstock.core.errors import BudgetError, ConfigError, StorageError
from penstock.engine.adapter import LowRankAdapter
from penstock.evaluate.tasks.recall import make_sample
from penstock.methods.kvswap.policy import KVSwap
from penstock.methods.search_space import settings_of
from penstock.methods.tuned_config import TunedConfig
from penstock.models import bundled_adapter
from penstock.models.bundled_adapter import find_adapter
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import LoadedModel, load
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import share_weights
from penstock.tuner import engine_run, fetch_survey, kvswap_search, other_policies, pace
from penstock.tuner.engine_run import EngineRun
from penstock.tuner.fidelity import KL_FLOOR
from penstock.tuner.lookup_tables import shipped_tables
from penstock.tuner.tune import Tuned, _read, tune
from penstock.tuner.tuning_task import TuningTask

READ_ANEW = _read
LAYERS = 3
WORDS = "The grass is green . The sky is blue . The sun is yellow . Here we go . "


@pytest.fixture(autouse=True, scope="module")
def _short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for module in (engine_run, fetch_survey):
            patched.setattr(module, "STEPS", 2 if module is fetch_survey else 1)
            patched.setattr(module, "WARM_STEPS", 1)
        for module in (fetch_survey, kvswap_search):
            patched.setattr(module, "ROUNDS", 2)
        patched.setattr(kvswap_search, "POINTS", 2)
        patched.setattr(kvswap_search, "TURNS", 1)
        patched.setattr(kvswap_search, "CHECKS", 2)
        patched.setattr(kvswap_search, "CORNER_POINTS", 1)
        patched.setattr(kvswap_search, "FINALISTS", 2)
        patched.setattr(kvswap_search, "FINAL_ROUNDS", 1)  # unlike `ROUNDS`
        patched.setattr(pace, "_PASSES", 1)
        patched.setattr(other_policies, "varied", partial(other_policies.varied, most=2))
        patched.setattr(other_policies, "MOST_RUN", 1)
        patched.setattr("penstock.tuner.tune.FORCED_TOKENS", 8)
        patched.setattr("penstock.tuner.tune.MOST_TEXTS", 1)
        some = [*settings_of(KVSwap)][::10]
        patched.setattr("penstock.tuner.candidates.settings_of", lambda _: some)
        patched.setattr("penstock.tuner.tune._read", _read_once)
        yield


READ: dict[Any, Any] = {}


def _read_once(loaded: LoadedModel, pieces: Sequence[Tensor], progress: Any) -> Any:
    """A text is read once with each model."""
    about = (loaded.model, *(tuple(piece.tolist()) for piece in pieces))
    if about not in READ:
        READ[about] = READ_ANEW(loaded, pieces, progress)
    return READ[about]


@pytest.fixture(scope="module")
def recall() -> LoadedModel:
    return load("recall")


@pytest.fixture(scope="module")
def short(recall: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Its first layers, with their adapter: a search takes half as long and does the same."""
    whole = find_adapter(fingerprint(recall.model))
    assert whole is not None
    model: Any = share_weights(recall.model)
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    model.config.layer_types = model.config.layer_types[:LAYERS]
    model.name_or_path = str(folder := tmp_path_factory.mktemp("short"))
    first = LowRankAdapter(whole.layers[:LAYERS], fingerprint(model), whole.tokens)
    first.save(folder / bundled_adapter._NAME)
    return LoadedModel(model=model, tokenizer=recall.tokenizer, name="short")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, recall: LoadedModel) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    assert recall.tokenizer is not None
    vocabulary = recall.tokenizer.get_vocab()
    sample = make_sample("two_walkers", 1400, random.Random("tune"), vocabulary)
    path.write_text(f"{sample.prompt} {sample.answer}")
    return path


@pytest.fixture(scope="module")
def quick(recall: LoadedModel, short: LoadedModel, text: Path) -> dict[str, Any]:
    tables = shipped_tables(fingerprint(recall.model))
    assert tables is not None
    return {
        "model": short, "max_context": 1024, "memory": "1/2", "disk": "nvme", "texts": [text],
        "tables": replace(tables, fingerprint=fingerprint(short.model)),
    }  # fmt: skip


@pytest.fixture(scope="module")
def tuned(quick: dict[str, Any]) -> Tuned:
    return tune(**{**quick, "policies": ["kvswap", "quest", "streaming_llm"], "max_batch": 2})


def test_solutions_cover_the_grid_within_the_budget(tuned: Tuned) -> None:
    config = tuned.config
    picks = [each for each in config.solutions if each.is_pick]
    assert sorted((each.batch, each.context) for each in picks) == [(1, 1024), (2, 1024)]
    for each in config.solutions:
        assert each.limit_bytes == config.limit_for(each.batch)
        assert each.predicted["resident_bytes"] <= each.limit_bytes
        assert each.predicted["tokens_per_s"] > 0
        assert (each.predicted["kl"] or 0) <= config.floor
    for pick in picks:
        rivals = [
            (each.measured or each.predicted)["tokens_per_s"] for each in config.solutions
            if (each.batch, each.context) == (pick.batch, pick.context)
        ]  # fmt: skip
        assert (pick.measured or pick.predicted)["tokens_per_s"] == max(rivals)


def test_the_explanation_names_the_disk_and_the_group(tuned: Tuned) -> None:
    words = tuned.config.explanation
    assert "NVMe: G=" in words
    assert "tokens/s predicted" in words


def test_the_reason_names_the_divergence_of_the_figures(tuned: Tuned) -> None:
    config = tuned.config
    last = max((each.batch, each.context) for each in config.solutions)
    found = [each for each in config.solutions if each.policy == "kvswap"]
    assert found
    for each in found:
        words = f"KL {each.predicted['kl']:.3f} of"
        assert words in each.reason
        assert words in config.explanation or (each.batch, each.context) != last


def test_nothing_on_the_front_is_beaten(tuned: Tuned) -> None:
    front = tuned.config.front
    assert front
    for one in front:
        for other in front:
            worse = [
                other["kl"] < one["kl"], other["tokens_per_s"] > one["tokens_per_s"],
                other["resident_bytes"] < one["resident_bytes"],
            ]  # fmt: skip
            assert not all(worse)


def test_a_policy_that_loses_too_much_says_how_much(tuned: Tuned, quick: dict[str, Any]) -> None:
    names = {each.policy for each in tuned.config.solutions}
    for name, why in tuned.refused.items():
        assert name not in names
        assert why.startswith(("KL ", "needs "))


def test_the_config_runs(tuned: Tuned, short: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    tuned.save(path)
    assert TunedConfig.load(path) == tuned.config
    [output] = penstock.LLM(short, config=path, policy="auto").generate(
        WORDS * 50, penstock.SamplingParams(max_tokens=4)
    )
    assert output.run.simulated == "nvme"
    assert output.run.memory.used_bytes <= tuned.config.limit_for(1)
    assert any("tuned for 1 x 1024" in notice for notice in output.run.notices)


def test_the_smallest_budget_that_is_named_would_do(quick: dict[str, Any]) -> None:
    with pytest.raises(BudgetError, match="smallest budget that would do") as caught:
        tune(**{**quick, "memory": "64KiB"})
    needed = caught.value.needed_bytes
    assert needed
    with pytest.raises(BudgetError):
        tune(**{**quick, "memory": needed - 1})
    assert tune(**{**quick, "memory": needed, "floor": 50.0}).config.limit_bytes == needed


def test_an_interrupted_tuning_goes_on_and_a_pick_that_loses_too_much_is_ruled_out(
    quick: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.tuner import tune as module

    # A pick that is ruled out has runs behind it that no interruption brings.
    monkeypatch.setattr(module, "_kl", lambda *_: 0.0)
    journal = tmp_path / "journal"
    runs: list[int] = []
    real = EngineRun.__init__

    def counted(self: EngineRun, *args: Any, **kwargs: Any) -> None:
        if len(runs) == 1 + kvswap_search.POINTS:  # the survey is over, and so are they
            raise KeyboardInterrupt
        runs.append(1)
        real(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(EngineRun, "__init__", counted)
        with pytest.raises(KeyboardInterrupt):
            tune(**quick, journal=journal)
    kept = len(journal.read_text().splitlines()) - 1
    assert kept == kvswap_search.POINTS + 2  # and the disk, and what is fetched

    made: list[int] = []

    def again(self: EngineRun, *args: Any, **kwargs: Any) -> None:
        made.append(1)
        real(self, *args, **kwargs)

    monkeypatch.setattr(EngineRun, "__init__", again)
    done = tune(**quick, journal=journal)
    assert journal.exists(), "nothing is lost before the config is there"
    assert len(made) == kvswap_search.CHECKS + kvswap_search.FINALISTS

    first: list[Any] = []

    def bad_once(task: Any, reference: Any, policy: Any) -> float:
        first[:] = first or [policy]
        return 10 * KL_FLOOR if policy == first[0] else 0.0

    monkeypatch.setattr(module, "_kl", bad_once)
    config = tune(**quick, journal=journal).config
    assert first[0] in [each.make_policy() for each in done.config.solutions]
    assert first[0] not in [each.make_policy() for each in config.solutions], "it is ruled out"
    assert config.solutions

    done.save(tmp_path / "config.json")
    assert not journal.exists()


def test_an_interrupted_tuning_within_free_memory_goes_on(
    quick: dict[str, Any], recall: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model, whose adapter and tables are shipped."""
    from penstock.tuner import tune as module

    class Stop(Exception):
        pass

    def stop(task: TuningTask, _: object) -> None:
        limits.append(task.limit_bytes)
        raise Stop

    monkeypatch.setattr(module, "search_kvswap", stop)
    whole_model = {**quick, "model": recall, "tables": None}
    limits, whole = list[int](), inspect_model(recall.model).kv.full_cache_bytes(1, 1024)
    for free in (whole, whole // 2):  # which is never the same twice
        monkeypatch.setattr(module, "free_bytes", lambda _, free=free: free)
        with pytest.raises(Stop):
            tune(**{**whole_model, "memory": "auto"}, journal=tmp_path / "journal")
    assert limits == [whole // 2] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_context": 100}, "must be at least 1024"),
        ({"max_batch": 0}, "max-batch 0"),
        ({"policies": ["kvswop"]}, "no policy 'kvswop'"),
        ({"policies": []}, "at least one policy"),
        ({"floor": 0.0}, "floor 0.0"),
        ({"floor": math.inf}, "floor inf must be .* finite"),
        ({"floor": math.nan}, "floor nan"),
        ({"memory": "lots"}, "lots"),
    ],
)
def test_bad_input_says_what_is_wrong(
    quick: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        tune(**{**quick, **change})


def test_a_journal_that_cannot_be_written(quick: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        tune(**quick, journal=tmp_path)


def test_tables_of_another_model_are_refused(
    quick: dict[str, Any], tuned: Tuned, tmp_path: Path
) -> None:
    path = tmp_path / "tables.json"
    tuned.tables.save(path)
    path.write_text(path.read_text().replace(tuned.tables.fingerprint, "0" * 16))
    with pytest.raises(ConfigError, match="made for another model"):
        tune(**{**quick, "tables": path})


def test_the_budget_is_a_share_of_the_full_cache(tuned: Tuned, short: LoadedModel) -> None:
    full = inspect_model(short.model).kv.full_cache_bytes(2, 1024)
    assert tuned.config.limit_bytes == full // 2
