"""mass=: units until the index has enough, an honest estimate of what a step has, and the floor."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock import KVSwap, TieredCache
from penstock.core.errors import ConfigError
from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.methods.kvswap.mass import PROBES, Chosen, MassMeter, selection_of
from penstock.models.cache_argument import cache_argument
from penstock.testing import PolicyContract
from penstock.testing.tiny_models import VOCABULARY, tiny_model

POLICY = KVSwap(mass=0.8, window_tokens=8, sink_tokens=4, selected_tokens=16, reuse_tokens=48)
ROWS, UNITS, HEADS = 2, 150, 3


class TestMassContract(PolicyContract):
    policies = (KVSwap(mass=0.9, index_block_tokens=0),)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def meter(mass: float = 0.9, rows: int = ROWS, unit_tokens: int = 1) -> MassMeter:
    return MassMeter(
        rows, HEADS, mass=mass, unit_tokens=unit_tokens, seed=1, device=torch.device("cpu")
    )


def drawn(seed: int = 0, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    """Logits of units as an index has them, and of what is kept."""
    random = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(ROWS, UNITS, HEADS, generator=random)
    return logits, torch.full((ROWS, HEADS), 3.0)


# Choosing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mass", [0.3, 0.6, 0.9])
def test_the_fewest_units_that_have_the_mass(mass: float) -> None:
    logits, kept = drawn()
    chosen = meter(mass).choose(logits, kept, np.zeros(ROWS, dtype=np.int64), UNITS - 1)
    everything = torch.cat([logits, kept[:, None]], dim=1).softmax(dim=1).mean(dim=2)
    for row in range(ROWS):
        share, base = everything[row, :-1], everything[row, -1]
        best = chosen.best[row]
        assert float(base + share[best].sum()) >= mass
        least = share[best].min()
        assert float(base + share[best].sum() - least) < mass, "one less would not do"
        assert float(share[~best].max()) <= float(least)
    assert not chosen.capped.any()


def test_room_is_the_most_and_said() -> None:
    logits, kept = drawn()
    by = meter(0.99)
    chosen = by.choose(logits, kept, np.array([0, 40]), 20)
    assert chosen.capped.all()
    assert (chosen.best.sum(dim=1) == 20 - PROBES).all()
    assert not chosen.best[1, :40].any(), "padding is not chosen"
    resident = chosen.best.clone()
    resident[:, 60:90] = True
    by.draw(chosen, resident)
    assert not resident.gather(1, chosen.probes).any(), "what is there is not drawn"
    assert int(chosen.probes[1].min()) >= 40, "nor is padding"


def test_a_selection_has_its_units_in_order_and_says_which_are_none() -> None:
    units = np.zeros((2, 9), dtype=np.bool_)
    units[0, [7, 2, 3]] = units[1, [8]] = True
    selection = selection_of(units)
    assert selection.unit_ids[0].tolist() == [2, 3, 7]
    assert selection.valid is not None
    assert selection.valid.tolist() == [[True] * 3, [True, False, False]]
    assert selection.unit_ids[1, 0] == 8
    assert selection_of(units[:1]).valid is None


def test_a_row_that_has_all_it_can_have_draws_nothing_new() -> None:
    logits, kept = drawn()
    by = meter(0.999)
    chosen = by.choose(logits, kept, np.array([0, UNITS - 5]), 60)
    assert chosen.best[1].sum() == 5
    by.draw(chosen, chosen.best)
    assert set(chosen.probes[1].tolist()) <= set(range(UNITS - 5, UNITS))
    estimate, _ = measured(by, chosen, logits, kept)
    assert float(estimate.captured[1]) == pytest.approx(1.0)
    whole = by.choose(logits, kept, np.zeros(ROWS, dtype=np.int64), 2 * UNITS)
    by.draw(whole, torch.ones_like(whole.best))
    assert whole.probes.shape[1] == 0
    estimate, _ = measured(by, whole, logits, kept)
    assert estimate.captured.tolist() == [1.0, 1.0]
    assert estimate.variance.tolist() == [0.0, 0.0]


# The estimate -------------------------------------------------------------------------------------


def measured(by: MassMeter, chosen: Chosen, logits: Tensor, kept: Tensor) -> Any:
    """What a step says whose true logits are these."""
    seen = chosen.best | chosen.left
    if chosen.probes.shape[1]:
        seen = seen.scatter(1, chosen.probes, value=True)
    shown = logits.masked_fill(~seen[:, :, None], -math.inf)
    attended = torch.logaddexp(shown.logsumexp(dim=1), kept)
    places = chosen.probes[:, :, None].expand(-1, -1, HEADS)
    return by.measure(chosen, attended, logits.gather(1, places)), true_mass(logits, kept, seen)


def true_mass(logits: Tensor, kept: Tensor, seen: Tensor) -> Tensor:
    shares = torch.cat([logits, kept[:, None]], dim=1).softmax(dim=1)
    return 1 - (shares[:, :-1] * ~seen[:, :, None]).sum(dim=1).mean(dim=1)


@pytest.mark.parametrize(("off", "with_left"), [(0.0, True), (0.8, False), (-0.8, True)])
def test_what_the_index_gets_wrong_is_learnt_from_probes(off: float, with_left: bool) -> None:
    """The index is noisy, and wrong by a factor on all units: the estimate is not, and its bars
    hold as often as they say."""
    by, errors, bars, naive = meter(0.8), [], [], []
    random = torch.Generator().manual_seed(4)
    for step in range(160):
        true, kept = drawn(seed=step, spread=1.2)
        said = true + 0.7 * torch.randn(true.shape, generator=random) - off
        chosen = by.choose(said, kept, np.zeros(ROWS, dtype=np.int64), 80)
        left = torch.rand(ROWS, UNITS, generator=random) < (0.1 if with_left else 0)
        by.draw(chosen, chosen.best | left)
        chosen.left = left & ~chosen.best
        estimate, mass = measured(by, chosen, true, kept)
        share = torch.cat([said, kept[:, None]], dim=1).softmax(dim=1)[:, :-1]
        seen = chosen.best | chosen.left
        naive.append(1 - (share * ~seen[:, :, None]).sum(dim=1).mean(dim=1) - mass)
        if step >= 20:
            errors.append(estimate.captured - mass)
            bars.append(1.96 * estimate.variance.sqrt())
    error, bar = torch.stack(errors), torch.stack(bars)
    assert abs(float(error.mean())) < 0.012
    assert float((error.abs() <= bar).float().mean()) > 0.9
    assert float(bar.mean()) < 0.15, "and say something"
    if off:
        assert abs(float(torch.stack(naive).mean())) > 3 * abs(float(error.mean()))


def test_rows_take_their_experience_along() -> None:
    by, other = meter(), meter(rows=3)
    for step in range(3):
        logits, kept = drawn(seed=step)
        chosen = by.choose(logits, kept, np.zeros(ROWS, dtype=np.int64), 40)
        by.draw(chosen, chosen.best)
        measured(by, chosen, logits - 0.5, kept)
    other.take_rows_from(by, torch.tensor([1, 0, 1]))
    assert torch.equal(other._found[0], by._found[1])
    assert torch.equal(other._said[1], by._said[0])
    by.reset()
    assert not by._said.any()
    assert other._said.any()


# In a cache ---------------------------------------------------------------------------------------


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(3, VOCABULARY, (n,), generator=draw).tolist() for n in (141, 90)]


def answers(model: Any, policy: Any, **options: Any) -> Any:
    params = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)
    options = {"memory": None, "store": "memory", **options}
    return LLM(model, policy=policy, **options).generate(prompts(), params)


@pytest.fixture(scope="module")
def full(model: PreTrainedModel) -> list[list[int]]:
    """The tokens of full attention."""
    return [each.token_ids for each in answers(model, "full")]


def test_exact_below_the_floor_is_full_attention(
    model: PreTrainedModel, full: list[list[int]]
) -> None:
    policy = replace(POLICY, floor=0.99999, below="exact")
    outputs = answers(model, policy)
    assert [each.token_ids for each in outputs] == full
    counters = outputs[0].run.stats.decode.counters
    assert counters["mass_exact"] > 0
    assert counters["mass_captured"] == pytest.approx(counters["mass_steps"], rel=1e-3)


def test_the_tail_is_the_mean_of_what_is_not_read(model: PreTrainedModel) -> None:
    """By the estimate's own weight, whatever has happened to the tokens: padding, crops, rows."""
    policy = replace(POLICY, mass=0.4, floor=0.9999, below="tail")
    ids = torch.tensor([prompts()[0], [0] * 51 + prompts()[1]])
    mask = torch.ones_like(ids)
    mask[1, :51] = 0
    with (
        TieredCache(model, policy, None, "memory", max_tokens=200, batch_size=2) as cache,
        torch.no_grad(),
    ):
        model(ids, attention_mask=mask, **cache_argument(model, cache))
        rows = [0, 1]
        for count, change in ((3, None), (2, "crop"), (2, "rows"), (1, None)):
            for _ in range(count):
                mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], dim=1)
                step = watched_step(model, cache, ids[:, :1], mask)
            for layer, (call, out, seen) in zip(cache.tiers.layers, step, strict=True):
                check_tail(layer, call, out, seen, mask.bool())
            if change == "crop":
                cache.crop(-2)
                mask = mask[:, :-2]
            elif change == "rows":
                rows = [rows[1], rows[0]]
                cache.reorder_cache(torch.tensor([1, 0]))
                mask = mask[[1, 0]]
    assert cache.stats.decode.counters["mass_tail"] > 0


def watched_step(
    model: Any, cache: TieredCache, ids: Tensor, mask: Tensor
) -> list[tuple[Any, Tensor, Tensor]]:
    """Each layer's call, answer, and what it attended to, in a decode step."""
    found: dict[int, list[Any]] = {}
    for number, layer in enumerate(cache.tiers.layers):

        def attend(call: Any, layer: Any = layer, number: int = number) -> Tensor:
            out: Tensor = type(layer).attend(layer, call)
            found[number] = [call, out]
            return out

        layer.attend = attend  # type: ignore[method-assign]
        layer.observer = lambda index, seen: attended.__setitem__(index, seen)  # type: ignore
    attended: dict[int, Tensor] = {}
    positions = (mask.cumsum(dim=1) - 1)[:, -1:]
    model(ids, attention_mask=mask, position_ids=positions, **cache_argument(model, cache))
    for layer in cache.tiers.layers:
        del layer.attend
    return [(*found[number], attended[number]) for number in range(len(found))]


def check_tail(layer: Any, call: Any, out: Tensor, seen: Tensor, visible: Tensor) -> None:
    """The answer is that over what was seen, mixed with the mean of the other values."""
    assert layer.estimate is not None
    tokens = layer.read_tokens(0, layer.length)
    keys, values = tokens[:, :, 0].transpose(1, 2), tokens[:, :, 1].transpose(1, 2)
    heads = call.query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(heads, dim=1) for part in (keys, values))
    logits = torch.matmul(call.query, keys.transpose(2, 3))[:, :, 0] * call.scaling
    weights = logits.masked_fill(~seen[:, None], -math.inf).softmax(dim=2)
    near = torch.einsum("rhk,rhkd->rhd", weights, values)
    others = (visible & ~seen).float()
    far = torch.einsum("rk,rhkd->rhd", others, values) / others.sum(dim=1)[:, None, None].clamp_min(
        1
    )
    share = layer.estimate.unread / (1 + layer.estimate.unread)
    low = layer.estimate.captured < 0.9999
    share = torch.where(low[:, None], share, 0.0)[:, :, None]
    wanted = near * (1 - share) + far * share
    torch.testing.assert_close(out[:, 0], wanted, rtol=1e-3, atol=1e-4)


def test_reading_again_has_more_of_the_attention(model: PreTrainedModel) -> None:
    mass, again = {}, {}
    for floor in (None, 0.95):
        policy = replace(POLICY, mass=0.5, floor=floor, reuse_tokens=96)
        counters = answers(model, policy)[0].run.stats.decode.counters
        mass[floor] = counters["mass_captured"] / counters["mass_steps"]
        again[floor] = counters.get("mass_read_again", 0)
    assert again[None] == 0
    assert again[0.95] > 0
    assert mass[0.95] > mass[None]


@pytest.mark.parametrize("memory", [None, "3MiB"])
def test_verified_tokens(model: PreTrainedModel, full: list[list[int]], memory: str | None) -> None:
    """Crops and padding: what a layer has chosen and learnt goes with its rows."""
    outputs = answers(model, POLICY, verify=4, memory=memory)
    assert [each.token_ids for each in outputs] == full


def test_several_answers(model: PreTrainedModel) -> None:
    """Forks, too."""
    params = SamplingParams(temperature=1.0, seed=2, n=2, max_tokens=6, ignore_eos=True)
    llm = LLM(model, policy=POLICY, memory=None, store="memory")
    [output] = llm.generate(prompts()[:1], params)
    assert len(output.outputs) == 2


def test_estimates_are_near_what_steps_attend_to(model: PreTrainedModel) -> None:
    """Against the true shares of each step's own queries, by layer."""
    from research.mass.steps import MassSteps

    ids = torch.tensor([prompts()[0]])
    policy = replace(POLICY, reuse_tokens=64)
    with TieredCache(model, policy, None, "memory", max_tokens=200, must_tier=True) as cache:
        run = MassSteps(model, cache)
        run.prefill(ids[:, :114], 64)
        for at in range(114, 141):
            run.decode(ids[:, at : at + 1])
        figures = run.figures()
    assert figures["steps"] == 27
    assert 0.5 < figures["true_mass"] < 0.999
    assert figures["mean_absolute_error"] < 0.05
    assert figures["held_by_bars"] > 0.5


def test_reordered_rows_go_on(model: PreTrainedModel) -> None:
    ids = torch.tensor([prompts()[0], prompts()[0][::-1]])
    with (
        TieredCache(model, POLICY, None, "memory", max_tokens=200, batch_size=2) as cache,
        torch.no_grad(),
    ):
        model(ids, **cache_argument(model, cache))
        for _ in range(3):
            model(ids[:, :1], **cache_argument(model, cache))
        cache.reorder_cache(torch.tensor([1, 1]))
        model(ids[:, :1], **cache_argument(model, cache))
        cache.crop(-2)
        cache.batch_select_indices(torch.tensor([0]))
        model(ids[:1, :1], **cache_argument(model, cache))
        assert cache.get_seq_length() == 144


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mass": 1.5}, "mass=1.5 must lie between 0 and 1"),
        ({"mass": 0.9, "floor": 0.0}, "floor=0.0 must lie between 0 and 1"),
        ({"floor": 0.8}, "floor=0.8 is for mass="),
        ({"mass": 0.9, "head_reduction": "sum"}, "mass= does not go with head_reduction='sum'"),
        ({"mass": 0.9, "attend": "selected"}, "attend='selected'"),
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KVSwap(**fields)


def test_the_device_tier_does_not_measure(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="give kvswap a store on disk"):
        TieredCache(model, POLICY, None, "host", max_tokens=64)
