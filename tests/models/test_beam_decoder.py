"""A search over tiers gives the tokens of one that computes everything anew, on many models."""

import gc
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock.core.errors import BudgetError, ConfigError, FetchError, StoreFullError
from penstock.engine.beams.decoding import BeamDecoder, StepRequest
from penstock.models.beam_cache import block_shape
from penstock.models.beam_decoder import ModelBeamDecoder, make_decoder
from penstock.search.beam_search import BeamSearch
from penstock.search.draws import make_choose
from penstock.search.search_params import SearchParams
from penstock.search.search_tree import SearchOutput
from penstock.search.step_scorer import LogProbabilityScorer
from penstock.search.step_texts import StepTexts
from penstock.search.transfer_model import TransferRequest, step_by_step, token_by_token
from penstock.storage.store import KVStore
from penstock.testing.faulty_file import FaultyFile
from penstock.testing.plain_decoder import PlainDecoder
from penstock.testing.tiny_models import FAMILIES, tiny_model

PROMPT = [3 + 7 * i % 150 for i in range(29)]
NEW, BLOCK = 18, 8
MOST = len(PROMPT) + NEW
LAYERS, PAGE = 3, 4096
"""Of the tiny models; a layer of a block lies in a page, a block in two."""
PAPER = {"share": False, "block_tokens": BLOCK}
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"strategy": "resident", "memory": None},
    "scheduled": {"memory": "1/3"},
    "scheduled-own-copies": {"memory": "2/5", "share": False},
    "scheduled-in-order": {"memory": "2/5", "share": False, "overlap": False, "balance": False},
    "layerwise": {"strategy": "layerwise", "memory": "1/2"},
}
TIERS = ("scheduled", "layerwise")


def search(decoder: BeamDecoder, **changes: Any) -> SearchOutput:
    settings = {"beams": 8, "width": 2, "step_tokens": 7, "max_new_tokens": NEW, "seed": 3}
    texts = StepTexts(None, end_token_ids=frozenset({2}))
    params = SearchParams(**{**settings, **changes})
    return BeamSearch(decoder, params, LogProbabilityScorer(), texts).run(PROMPT)


def found(output: SearchOutput) -> list[tuple[list[int], Any]]:
    return [(beam.token_ids, pytest.approx(beam.score, abs=1e-4)) for beam in output.beams]


def decoder_of(model: PreTrainedModel, **options: Any) -> ModelBeamDecoder:
    settings = {"store": "memory", "beams": 8, "width": 2, "max_tokens": MOST, "memory": "1/3"}
    return make_decoder(model, **{**settings, "block_tokens": BLOCK, **options})


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def wanted(llama: PreTrainedModel) -> list[tuple[list[int], Any]]:
    return found(search(PlainDecoder(llama, max_tokens=MOST)))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_tokens_of_the_plain_model(
    way: str, llama: PreTrainedModel, wanted: list[tuple[list[int], Any]]
) -> None:
    decoder = decoder_of(llama, **WAYS[way])
    try:
        assert found(search(decoder)) == wanted
    finally:
        decoder.close()


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family not in ("llama", "mistral", "qwen2")]
)
def test_every_tier_gives_the_tokens_of_the_plain_model(family: str) -> None:
    """The ways that the engine sees differently, of fewer beams, on other models.

    Both where layers have windows, else in turn."""
    model = tiny_model(family)
    # Two whole steps, and what is left.
    sizes = {"beams": 4, "step_tokens": 4, "max_new_tokens": 10}
    wanted = found(search(PlainDecoder(model, max_tokens=MOST), **sizes))
    windows = family in ("gemma2", "gemma3", "gpt_oss")
    for way in TIERS if windows else [TIERS[list(FAMILIES).index(family) % 2]]:
        decoder = decoder_of(model, **WAYS[way])
        try:
            assert found(search(decoder, **sizes)) == wanted, way
        finally:
            decoder.close()


@pytest.mark.parametrize(
    ("store", "block_tokens", "memory"), [("disk", 1, "300KiB"), ("ufs", 16, "200KiB")]
)
def test_blocks_and_stores_change_nothing(
    llama: PreTrainedModel, wanted: list[tuple[list[int], Any]], store: str, block_tokens: int,
    memory: str, tmp_path: Path,
) -> None:  # fmt: skip
    place = str(tmp_path) if store == "disk" else store
    decoder = decoder_of(llama, store=place, block_tokens=block_tokens, memory=memory, share=False)
    try:
        output = search(decoder)
    finally:
        decoder.close()
    assert found(output) == wanted
    assert output.traffic.loaded_bytes > 0
    assert decoder.simulated == (None if store == "disk" else "ufs")
    assert not list(tmp_path.iterdir())


def test_measured_bytes_are_those_of_the_transfer_model(llama: PreTrainedModel) -> None:
    shape = block_shape(llama, BLOCK)
    beams, step, prompt, new = 8, 16, 32, 32
    slots = 3 * (prompt + new) // BLOCK  # three beams to the end
    request = TransferRequest.of_shape(
        shape.kv, beams=beams, step_tokens=step, prompt_tokens=prompt, new_tokens=new,
        memory_bytes=slots * shape.block_bytes, block_tokens=BLOCK,
    )  # fmt: skip
    common: dict[str, Any] = {"max_tokens": prompt + new, "beams": beams, **PAPER}
    loaded = {}
    ways: dict[str, dict[str, Any]] = {
        "token": {"strategy": "layerwise", "memory": slots * LAYERS * PAGE},
        "step": {"memory": slots * 2 * PAGE + (1 << 15), "overlap": False, "balance": False},
    }
    for name, options in ways.items():
        decoder = decoder_of(llama, **common, **options)
        params = SearchParams(
            beams=beams, width=2, seed=1, step_tokens=step, max_new_tokens=new, ignore_end=True
        )
        tokens = [5] * prompt
        try:
            output = BeamSearch(decoder, params, LogProbabilityScorer(), StepTexts(None)).run(
                tokens
            )
        finally:
            decoder.close()
        loaded[name] = output.traffic.loaded_bytes
    assert loaded["step"] == pytest.approx(step_by_step(request, "start").total_bytes, rel=0.02)
    # Layer-wise offloading loads whole blocks, and counts in them what fits: Eq. 1-3 by blocks.
    blocks = [length // BLOCK for length in range(prompt, prompt + new)]
    kept = [min(LAYERS, slots * LAYERS // (beams * n)) for n in blocks]
    by_blocks = sum((LAYERS - k) * n for k, n in zip(kept, blocks, strict=True))
    assert loaded["token"] == by_blocks * beams * shape.layer_bytes
    assert loaded["token"] < token_by_token(request).total_bytes < 1.2 * loaded["token"]


def _ends_at(ends: Sequence[int], beam: int, token_ids: Sequence[int]) -> bool:
    return len(token_ids) == ends[beam]


def test_a_row_that_stops_early_goes_on_from_where_it_stopped(llama: PreTrainedModel) -> None:
    choose = make_choose(temperature=0)
    tokens: dict[str, list[list[list[int]]]] = {}
    for way in ("plain", "scheduled"):
        decoder: Any = PlainDecoder(llama, max_tokens=MOST) if way == "plain" else decoder_of(llama)
        root = decoder.prefill(PROMPT)
        beams = decoder.fork(root, 3)
        for ends in ((2, 5, 9), (4, 1, 9)):
            result = decoder.run_step(beams, StepRequest(
                num_tokens=9, uniforms=torch.zeros(3, 9, dtype=torch.float64), choose=choose,
                stops=partial(_ends_at, ends),
            ))  # fmt: skip
            assert [len(ids) for ids in result.token_ids] == [*ends]
            tokens.setdefault(way, []).append(result.token_ids)
        assert [beam.length for beam in beams] == [len(PROMPT) + n for n in (6, 6, 18)]
        decoder.close()
    assert tokens["plain"] == tokens["scheduled"]


def test_the_budget_is_kept_and_too_little_is_refused(llama: PreTrainedModel) -> None:
    decoder = decoder_of(llama)
    search(decoder)
    report = decoder.report()
    decoder.close()
    assert report.peak_bytes <= report.limit_bytes
    work = [tensors.work for tensors in decoder._memory._groups._kept.values()]
    held = sum(
        4 * (w.table.numel() + w.rows.numel() + w.parts.numel() + w.places.numel())
        + 4 * (w.first_block.numel() + w.num_blocks.numel() + 2 * w.table.shape[0])
        for w in work
    )
    assert 0 < held <= report.items["tables"]
    with pytest.raises(BudgetError, match="room for 1 beam of 47 tokens") as caught:
        decoder_of(llama, memory="8KiB")
    assert caught.value.needed_bytes is not None
    decoder_of(llama, memory=caught.value.needed_bytes).close()
    with pytest.raises(BudgetError, match="8 beams"):
        decoder_of(llama, strategy="resident", memory="1/2")
    with pytest.raises(BudgetError, match="1 beam"):
        decoder_of(llama, strategy="layerwise", memory="1KiB")


def test_what_makes_no_sense_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"store=host is for caches.* give memory"):
        decoder_of(llama, store="host")
    with pytest.raises(ConfigError, match="no strategy 'greedy'"):
        decoder_of(llama, strategy="greedy")
    with pytest.raises(ConfigError, match="must be positive"):
        decoder_of(llama, beams=0)
    decoder = decoder_of(llama)
    with pytest.raises(ConfigError, match="a prompt of 0 tokens"):
        decoder.prefill([])
    beam = decoder.prefill(PROMPT)
    choose, uniforms = make_choose(), torch.zeros(1, 40, dtype=torch.float64)
    with pytest.raises(ConfigError, match="a step of 40 tokens after 29 passes the 47"):
        decoder.run_step([beam], StepRequest(num_tokens=40, uniforms=uniforms, choose=choose))
    decoder.close()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> list[FaultyFile]:
    """Every store that opens from now on fails as its files are told."""
    files: list[FaultyFile] = []
    create = KVStore.create.__func__  # type: ignore[attr-defined]

    def create_faulty(cls: Any, *args: Any, **kwargs: Any) -> KVStore:
        store: KVStore = create(cls, *args, **kwargs)
        for region in store._regions:
            region.file = FaultyFile(region.file)
            files.append(region.file)
        return store

    monkeypatch.setattr(KVStore, "create", classmethod(create_faulty))
    return files


@pytest.mark.parametrize("way", ["scheduled-in-order", "layerwise"])
@pytest.mark.parametrize("what", ["reads", "writes"])
def test_a_disk_that_fails_is_an_error_and_leaves_nothing_behind(
    llama: PreTrainedModel, way: str, what: str, faulty: list[FaultyFile]
) -> None:
    implementation = llama.config._attn_implementation
    gc.collect()
    threads = set(threading.enumerate())
    decoder = decoder_of(llama, **WAYS[way])
    for file in faulty:
        setattr(file, f"failing_{what}", range(3, 1 << 20))
    with pytest.raises(FetchError if what == "reads" else StoreFullError):
        search(decoder)
    decoder.close()
    decoder.close()
    assert set(threading.enumerate()) <= threads
    assert llama.config._attn_implementation == implementation


@pytest.mark.parametrize("strategy", ["scheduled", "layerwise", "resident"])
@pytest.mark.parametrize("memory", ["auto", "1/1", 1.0, "100%"])
@pytest.mark.parametrize("beams", [1, 4])
def test_everything_holds_a_short_search(
    memory: float | str, strategy: str, beams: int, llama: PreTrainedModel
) -> None:
    """What a beam takes beside its own tokens counts where everything is asked for."""
    whole = decoder_of(llama, beams=beams, width=1, max_tokens=12, memory=None, strategy=strategy)
    whole.close()
    decoder = decoder_of(
        llama, beams=beams, width=1, max_tokens=12, memory=memory, strategy=strategy
    )
    decoder.close()
    assert decoder.report().limit_bytes == whole.report().limit_bytes
