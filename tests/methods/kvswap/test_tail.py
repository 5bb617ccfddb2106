"""tail="mean" of KVSwap: the mean value of what a step did not read, and the sum it is made of."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock import KVSwap, TieredCache
from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.policy import SelectionPolicy
from penstock.engine.retrieval_layer import RetrievalLayer
from penstock.engine.value_sum import ValueSum
from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.kernels.plain_attention import NEGATIVE_INFINITY
from penstock.methods.kvswap.tail_layer import TailLayer
from penstock.testing import PolicyContract, policy_contract
from penstock.testing.mirrored_runtime import SCALING, SHAPE, make_runtime
from penstock.testing.tiny_models import VOCABULARY, tiny_model

POLICY = KVSwap(
    tail="mean", group_tokens=1, window_tokens=8, sink_tokens=4, selected_tokens=16,
    reuse_tokens=24, rank=SHAPE.joint_dim, index_bits=16,
)  # fmt: skip
"""Its index has the logits themselves, rounded to 8 bits of a mantissa."""
GROUPS = replace(POLICY, group_tokens=4, rank=8, index_bits=8)


class TestTailContract(PolicyContract):
    policies = (KVSwap(tail="mean", group_tokens=8, index_block_tokens=0),)

    def test_a_row_answers_as_it_does_alone(  # type: ignore[override]
        self, policy: SelectionPolicy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The basis is fitted to all rows. Units selected stay the same; the weight of the mean is
        no choice, and follows the basis a little."""
        monkeypatch.setattr(policy_contract, "TOLERANCE", 2e-3)
        super().test_a_row_answers_as_it_does_alone(policy)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


# The sum ------------------------------------------------------------------------------------------


def test_a_sum_of_values_is_of_what_came_and_went() -> None:
    draw = torch.Generator().manual_seed(0)
    shape = KVShape(
        num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32
    )
    values = torch.randn(2, 2, 30, 8, generator=draw)
    visible = torch.arange(30) >= torch.tensor([[0], [7]])
    total = ValueSum(2, shape, torch.device("cpu"))
    total.add(values[:, :, :20], visible[:, :20])
    total.add(values[:, :, 20:], None)
    total.take_away(values[:, :, 26:], None)
    assert total.tokens == 26
    mask = torch.full((2, 26), NEGATIVE_INFINITY)
    mask[:, 10:15] = 0.0
    for row, start in enumerate((0, 7)):
        rest = torch.cat([values[row, :, start:10], values[row, :, 15:26]], dim=1)
        mean = total.mean_without(values[:, :, :26], mask)[row]
        assert (mean - rest.mean(dim=1)).abs().max() < 1e-5
    mask[:, 7:] = mask[0] = 0.0
    assert (total.mean_without(values[:, :, :26], mask) == 0).all(), "nothing is left"
    other = ValueSum(1, shape, torch.device("cpu"))
    other.take_rows_from(total, torch.tensor([1]))
    assert other.tokens == 26
    assert torch.equal(other.state(), total._sum[1])
    total.reset()
    assert (total.tokens, float(total._sum.abs().sum())) == (0, 0.0)
    assert other.state().any()


@pytest.mark.parametrize(
    "broken",
    [
        lambda state: state[:1],
        lambda state: state.double(),
        lambda state: state / 0,
    ],
    ids=["shape", "dtype", "infinite"],
)
def test_what_is_no_sum_is_not_taken(broken: Callable[[Tensor], Tensor]) -> None:
    total = ValueSum(2, SHAPE, torch.device("cpu"))
    state = torch.ones(SHAPE.num_kv_heads, SHAPE.head_dim)
    assert not total.load_state(broken(state), 9)
    assert total.tokens == 0
    assert total.load_state(state, 9)
    assert (total._sum == 1).all()


# Steps --------------------------------------------------------------------------------------------


class Steps:
    """A runtime fed with random tokens, and the attention that it should have."""

    def __init__(self, policy: KVSwap, padding: Sequence[int]) -> None:
        self.runtime = make_runtime(policy, len(padding))
        self.padding = torch.tensor(padding)
        self.random = torch.Generator().manual_seed(3)
        self.keys = self.values = torch.zeros(
            SHAPE.num_layers, len(padding), SHAPE.num_kv_heads, 0, SHAPE.head_dim
        )
        self.seen: dict[int, Tensor] = {}

    @property
    def parts(self) -> list[float]:
        """Of the mean that layers take in, the least of their rows."""
        layers: Any = self.runtime.layers
        return [float(layer._part.min()) for layer in layers]

    def feed(self, count: int = 1) -> tuple[float, float, float]:
        """Take tokens in, in every layer.

        Returns:
            How far the outputs are from full attention's, and from what they should be; and the
            least share of what was not attended to.
        """
        rows, length = len(self.padding), self.keys.shape[3] + count
        visible = torch.arange(length) >= self.padding[:, None]
        shown = None if bool(visible.all()) else visible
        news, far, off, least = [], 0.0, 0.0, 1.0
        for layer in range(SHAPE.num_layers):
            new = torch.randn(
                2, rows, SHAPE.num_kv_heads, count, SHAPE.head_dim, generator=self.random
            )
            new[1] += 1.0  # so that the mean says something
            size = (rows, SHAPE.num_query_heads, count, SHAPE.head_dim)
            query = torch.randn(size, generator=self.random)
            news.append(new)
            for made in self.runtime.layers:
                assert isinstance(made, RetrievalLayer)
                made.observer = self.seen.__setitem__
            call = AttentionCall(query, new[0], new[1], SCALING, visible=shown)
            out = self.runtime.attend(layer, call)[:, -1]
            if count > 1:
                continue
            keys = torch.cat([self.keys[layer], new[0]], dim=2)
            values = torch.cat([self.values[layer], new[1]], dim=2)
            made = self.runtime.layers[layer]
            part = made._part if isinstance(made, TailLayer) else torch.zeros(rows)
            full, wanted, missed = attention(
                query[:, :, 0], keys, values, visible, self.seen[layer], part
            )
            far = max(far, float((out - full).norm() / full.norm()))
            off = max(off, float((out - wanted).norm() / wanted.norm()))
            least = min(least, missed)
        both = torch.stack(news)
        self.keys = torch.cat([self.keys, both[:, 0]], dim=3)
        self.values = torch.cat([self.values, both[:, 1]], dim=3)
        return far, off, least

    def crop(self, length: int) -> None:
        self.runtime.crop(length)
        self.keys, self.values = self.keys[:, :, :, :length], self.values[:, :, :, :length]

    def select_rows(self, rows: list[int]) -> None:
        self.runtime.select_rows(torch.tensor(rows))
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.padding = self.padding[rows]


def attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, seen: Tensor, part: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Full attention, and with a part of a mean value for what was not seen. query: [rows, heads,
    head_dim]"""
    shared = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(shared, dim=1) for each in (keys, values))
    logits = (keys @ query[..., None])[..., 0] * SCALING
    weights = logits.masked_fill(~visible[:, None], -math.inf).softmax(dim=2)
    full = (weights[:, :, None] @ values)[:, :, 0]
    rest = visible & ~seen
    out = ((weights * seen[:, None])[:, :, None] @ values)[:, :, 0]
    mean = (values * rest[:, None, :, None]).sum(dim=2) / rest.sum(dim=1)[:, None, None]
    missed = (weights * rest[:, None]).sum(dim=2, keepdim=True)
    bare = out / (1 - missed)
    return full, bare + part[:, None, None] * (out + missed * mean - bare), float(missed.mean())


NEAR = 4e-3
"""Of logits that are rounded to bfloat16."""


def near(steps: Steps, count: int = 1) -> None:
    for _ in range(count):
        _, off, missed = steps.feed()
        assert off < NEAR
        assert missed > 0.1, "there is something to add"


@pytest.mark.parametrize(
    ("padding", "reuse"), [((0,), 0), ((0, 13), 24)],
    ids=["one row, shared pools", "padded rows, own pools"],
)  # fmt: skip
def test_what_is_not_read_is_one_mean_value(padding: Sequence[int], reuse: int) -> None:
    steps = Steps(replace(POLICY, reuse_tokens=reuse), padding)
    for count in (40, 1, 23):  # a prompt in pieces
        steps.feed(count)
    near(steps, 6)
    assert min(steps.parts) > 0.5, "random values are near their mean"


@pytest.mark.parametrize("length", [88, 83, 50], ids=["window", "units", "behind the window"])
def test_cropped_tokens_leave_the_mean(length: int) -> None:
    steps = Steps(POLICY, (0, 13))
    steps.feed(80)
    near(steps, 9)
    steps.crop(length)
    near(steps, 5)
    steps.feed(7)
    near(steps, 2)


def test_rows_take_their_mean_along() -> None:
    steps = Steps(POLICY, (0, 13))
    steps.feed(70)
    near(steps, 2)
    steps.select_rows([1, 0])
    near(steps, 2)
    steps.select_rows([0])
    near(steps, 2)
    steps.runtime.reset()
    again = Steps(POLICY, (0,))
    again.runtime.close()
    again.runtime = steps.runtime
    again.feed(60)
    near(again, 2)


def test_a_mean_is_nearer_than_nothing() -> None:
    """With an index that guesses, in groups."""
    far = {}
    for tail in ("mean", "none"):
        steps = Steps(replace(GROUPS, tail=tail), (0, 13))
        steps.feed(100)
        far[tail] = sum(steps.feed()[0] for _ in range(10))
    assert far["mean"] < 0.7 * far["none"]


def test_a_mean_that_is_far_from_what_is_missed_is_left_out() -> None:
    """Half of the tokens have all of the attention and one value, the others another value."""
    draw = torch.Generator().manual_seed(1)
    kind = torch.where(torch.arange(100) % 2 == 0, 1.0, -1.0)[:, None]
    new = 0.1 * torch.randn(2, 1, SHAPE.num_kv_heads, 100, SHAPE.head_dim, generator=draw)
    new += kind
    query = torch.ones(1, SHAPE.num_query_heads, 100, SHAPE.head_dim)
    runtime = make_runtime(POLICY, 1)
    for layer in range(SHAPE.num_layers):
        runtime.attend(layer, AttentionCall(query, new[0], new[1], SCALING))
    for layer in range(SHAPE.num_layers):
        one = AttentionCall(query[:, :, :1], new[0, :, :, :1], new[1, :, :, :1], SCALING)
        out = runtime.attend(layer, one)
        assert (out - 1).abs().max() < 0.2
        part = runtime.layers[layer]._part  # type: ignore[attr-defined]
        assert 0 <= float(part) < 0.1


# Models -------------------------------------------------------------------------------------------


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(3, VOCABULARY, (n,), generator=draw).tolist() for n in (141, 90)]


def answers(model: Any, policy: Any, **options: Any) -> Any:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"memory": None, "store": "memory", **options}
    return LLM(model, policy=policy, **options).generate(prompts(), params)


def test_verified_tokens_are_full_attentions(model: PreTrainedModel) -> None:
    full = [each.token_ids for each in answers(model, "full")]
    policy = replace(GROUPS, rank=None, index_bits=None)
    assert [each.token_ids for each in answers(model, policy, verify=4)] == full


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tail": "median"}, "tail=median must be mean or none"),
        ({"tail": "mean", "mass": 0.9}, "tail=mean and mass= do not go together"),
        ({"tail": "mean", "head_reduction": "sum"}, "does not go with head_reduction='sum'"),
        ({"tail": "mean", "attend": "selected"}, "attend='selected'"),
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KVSwap(**fields)


def test_the_device_tier_leaves_nothing_out_unsaid(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="give kvswap a store on disk"):
        TieredCache(model, POLICY, None, "host", max_tokens=64)
