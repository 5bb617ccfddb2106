"""A search on a GPU, in CUDA graphs: the tokens of the plain model, whatever is moved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.beams.decoding import BeamDecoder
from penstock.models.beam_decoder import make_decoder
from penstock.search.beam_search import BeamSearch
from penstock.search.search_params import SearchParams
from penstock.search.step_scorer import LogProbabilityScorer
from penstock.search.step_texts import StepTexts
from penstock.testing.plain_decoder import PlainDecoder
from penstock.testing.tiny_models import tiny_model

pytestmark = pytest.mark.gpu

PROMPT = [3 + 7 * i % 150 for i in range(29)]
NEW, BLOCK = 48, 16
MOST = len(PROMPT) + NEW
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"strategy": "resident", "memory": None},
    "scheduled": {"memory": "1/2"},
    "scheduled-own-copies": {"memory": "3/5", "share": False},
    "scheduled-in-order": {"memory": "3/5", "share": False, "overlap": False, "balance": False},
    "layerwise": {"strategy": "layerwise", "memory": "1/2"},
    "disk": {"memory": "3/5", "share": False, "store": "disk"},
}


def found(decoder: BeamDecoder, *, ends: frozenset[int]) -> list[tuple[list[int], Any]]:
    params = SearchParams(beams=8, width=2, step_tokens=12, max_new_tokens=NEW, seed=3)
    texts = StepTexts(None, end_token_ids=ends)
    output = BeamSearch(decoder, params, LogProbabilityScorer(), texts).run(PROMPT)
    return [(beam.token_ids, pytest.approx(beam.score, abs=1e-3)) for beam in output.beams]


@pytest.mark.parametrize("ends", [frozenset[int](), frozenset({2, 3, 4, 5})])
@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
def test_every_tier_gives_the_tokens_of_the_plain_model(
    family: str, ends: frozenset[int], tmp_path: Path
) -> None:
    model = tiny_model(family).to("cuda")
    wanted = found(PlainDecoder(model, max_tokens=MOST), ends=ends)
    for way, options in WAYS.items():
        settings = {"memory": "1/2", "store": "auto", "block_tokens": BLOCK, **options}
        if settings["store"] == "disk":
            settings["store"] = str(tmp_path)
        decoder = make_decoder(model, beams=8, width=2, max_tokens=MOST, **settings)
        try:
            assert found(decoder, ends=ends) == wanted, way
            graphs = decoder._runner._recorded.values()
            assert not decoder.notices, way
            if way != "layerwise":
                assert any(each.graph is not None for each in graphs), way
        finally:
            decoder.close()


def test_memory_is_what_the_ledger_says() -> None:
    model = tiny_model("llama").to("cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    decoder = make_decoder(model, beams=64, width=2, max_tokens=512, memory=64 << 20)
    held = torch.cuda.memory_allocated() - before
    items = decoder.report().items
    decoder.close()
    assert held == pytest.approx(items["beam slots"], rel=0.05)
    assert torch.cuda.memory_allocated() - before < 1 << 20
