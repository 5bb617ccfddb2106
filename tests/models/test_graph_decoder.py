"""A recorded decode step gives the tokens of one that is launched piece by piece."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from penstock import KVSwap, TieredCache
from penstock.methods import Quest, SelectionPolicy
from penstock.methods.baselines.arkvale import ArkVale
from penstock.methods.louiskv.policy import LouisKV
from penstock.models import fused_step
from penstock.models.cache_argument import cache_argument
from penstock.testing.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.gpu

BUDGET: dict[str, Any] = {"selected_tokens": 32, "window_tokens": 8, "sink_tokens": 4}
ALL: dict[str, Any] = {**BUDGET, "selected_tokens": 10**6}
POLICIES: dict[str, SelectionPolicy] = {
    "louiskv": LouisKV(tau=0.9, cluster_tokens=8, **BUDGET),
    "quest": Quest(group_tokens=8, **BUDGET),
    "arkvale": ArkVale(group_tokens=8, **BUDGET),
    "kvswap": KVSwap(**BUDGET),
    "kvswap-keep": KVSwap(keep=3, **BUDGET),
    "louiskv-ahead": LouisKV(tau=0.9, cluster_tokens=8, predict=True, **BUDGET),
    "louiskv-whole": LouisKV(tau=0.9, cluster_tokens=8, full_layers=1, **BUDGET),
    "quest-whole": Quest(group_tokens=8, full_layers=2, **BUDGET),
    "arkvale-ahead": ArkVale(group_tokens=8, predict=True, **BUDGET),
}


def inputs(batch: int, tokens: int = 120) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (batch, tokens), generator=random)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        ids[row, : 10 * row], mask[row, : 10 * row] = 0, 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda()}


def answer(model: Any, cache: Any, batch: int) -> Any:
    return model.generate(
        **inputs(batch), **cache_argument(model, cache), max_new_tokens=50, do_sample=False,
        pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_a_replay_says_what_a_step_says(name: str, batch: int) -> None:
    model = tiny_model("llama").cuda()
    told = []
    for graphs in (False, True):
        with TieredCache(
            model, POLICIES[name], store="host", max_tokens=200, batch_size=batch,
            cuda_graphs=graphs,
        ) as cache:  # fmt: skip
            out = answer(model, cache, batch)
            told.append((out.sequences, torch.stack(out.logits), cache.stats.decode.units_hit))
            decoder = cache.graph_decoder
            assert (decoder is not None and decoder._graph is not None) == graphs
            assert all("adapter" in told or "predicted" in told for told in cache.notices)
            assert cache.get_seq_length() == 169
    (plain, logits, hits), (recorded, again, hits_again) = told
    assert torch.equal(plain, recorded)
    assert (logits - again).abs().max().item() < 1e-4
    assert hits == hits_again


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_a_recorded_step_at_full_budget_equals_full_attention(
    family: str, predict: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_step, "ENABLED", fused)
    model = tiny_model(family).cuda()
    expected = answer(model, DynamicCache(config=model.config), 2)
    with TieredCache(
        model, LouisKV(cluster_tokens=8, predict=predict, **ALL), store="host", max_tokens=200,
        batch_size=2,
    ) as cache:  # fmt: skip
        actual = answer(model, cache, 2)
        assert cache.graph_decoder is not None
        assert cache.graph_decoder._graph is not None
    assert torch.equal(expected.sequences, actual.sequences)
    difference = torch.stack(expected.logits) - torch.stack(actual.logits)
    assert difference.abs().max().item() < 1e-3


def _asks(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """What a graph cannot hold: the device is asked, and waited for."""
    assert inputs[0].isfinite().all().item()


@pytest.mark.parametrize("predict", [False, True])
@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_model_that_cannot_be_recorded_goes_on_without(family: str, predict: bool) -> None:
    """Sliding windows keep a cache of their own, which a graph would freeze; the other asks the
    device in the middle of a step, as OPT does in older releases."""
    model = tiny_model(family).cuda()
    if family == "llama":
        model.model.layers[1].mlp.register_forward_pre_hook(_asks)
    expected = answer(model, DynamicCache(config=model.config), 1)
    with TieredCache(
        model, LouisKV(cluster_tokens=8, predict=predict, **ALL), store="host", max_tokens=200,
        batch_size=1,
    ) as cache:  # fmt: skip
        actual = answer(model, cache, 1)
        assert cache.graph_decoder is not None
        assert cache.graph_decoder._graph is None
        assert len(cache.notices) == (family == "llama") + predict
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.equal(expected.sequences, actual.sequences)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("predict", [False, True])
def test_recorded_or_not_by_the_release_the_answer_is_the_same(predict: bool) -> None:
    """OPT is recorded from transformers 5.24 on, where it takes its positions."""
    model = tiny_model("opt").cuda()
    expected = answer(model, DynamicCache(config=model.config), 1)
    with TieredCache(
        model, LouisKV(cluster_tokens=8, predict=predict, **ALL), store="host", max_tokens=200,
        batch_size=1,
    ) as cache:  # fmt: skip
        actual = answer(model, cache, 1)
    assert torch.equal(expected.sequences, actual.sequences)
