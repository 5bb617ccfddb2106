"""What comes in pieces - padded chunks, turns, other texts, other batches - is taken in right."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.errors import BudgetError, PromptError
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.device_tier.device_layer import DeviceLayer
from penstock.engine.retrieval_layer import RetrievalLayer
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods import POLICIES, KVSwap, Quest, SelectionPolicy
from penstock.methods.baselines.infinigen import InfiniGen
from penstock.methods.baselines.loki import Loki
from penstock.methods.louiskv.policy import LouisKV
from penstock.testing.pairs import covering

SHAPE = KVShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
SCALING = 0.25
BUDGET: dict[str, Any] = {"selected_tokens": 24, "window_tokens": 8, "sink_tokens": 4}
KVSWAP = KVSwap(rank=8, predict=False, **BUDGET)
QUEST = Quest(group_tokens=8, **BUDGET)
LOUISKV = LouisKV(tau=-1, cluster_tokens=8, block_tokens=150, **BUDGET)
"""Retrieves once behind a prompt, and never again."""


def make_runtime(policy: SelectionPolicy, batch: int = 2, **changes: Any) -> TieredRuntime:
    options: dict[str, Any] = {
        "shape": SHAPE, "policy": policy, "limit_bytes": None, "store": "memory",
        "max_tokens": 600, "exact": False, "adapter": None, "device": torch.device("cpu"),
    }  # fmt: skip
    return TieredRuntime(RuntimeSettings(**{**options, **changes}), batch)


class Text:
    """Keys, values and queries of a text, the same whatever pieces they are asked for in."""

    def __init__(self, batch: int = 2, length: int = 600, seed: int = 0, rank: int = 6) -> None:
        draw = torch.Generator().manual_seed(seed)
        layers, dim = SHAPE.num_layers, SHAPE.head_dim

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=draw)

        near = normal(layers, 1, 2, rank, dim)  # keys of a text lie near a subspace
        self.keys = normal(layers, batch, 2, length, rank) @ near + 0.1 * normal(
            layers, batch, 2, length, dim
        )
        self.values = normal(layers, batch, 2, length, dim)
        self.queries = 2 * normal(layers, batch, 4, length, dim)

    def feed(
        self, runtime: TieredRuntime, start: int, end: int, visible: Tensor | None = None
    ) -> Tensor:
        """What the layers answer to [start, end). [layers, batch, tokens, heads, head_dim]"""
        shown = None if visible is None else visible[:, :end]
        out = []
        for layer in range(SHAPE.num_layers):
            query, keys, values = (
                each[layer][:, :, start:end] for each in (self.queries, self.keys, self.values)
            )
            call = AttentionCall(query, keys, values, SCALING, visible=shown)
            out.append(runtime.attend(layer, call))
        return torch.stack(out)

    def decode(self, runtime: TieredRuntime, start: int, steps: int, **more: Any) -> Tensor:
        """As `feed`, one token after the other."""
        answers = [self.feed(runtime, i, i + 1, **more) for i in range(start, start + steps)]
        return torch.cat(answers, dim=2)


@pytest.mark.parametrize("device_tier", [False, True])
@pytest.mark.parametrize(
    "policy", [KVSWAP, Quest(group_tokens=8, **BUDGET)], ids=["kvswap", "quest"]
)
def test_a_row_that_is_all_padding_in_the_first_chunk(
    policy: SelectionPolicy, device_tier: bool
) -> None:
    text = Text()
    text.keys[:, 1, :, :72] *= 3  # padding's keys are a token's: nothing says that they are small
    visible = torch.arange(600) >= torch.tensor([0, 72])[:, None]
    answers = []
    for chunk in (128, 64, 48):
        runtime = make_runtime(policy, device_tier=device_tier)
        for start in range(0, 128, chunk):
            text.feed(runtime, start, min(start + chunk, 128), visible)
        answers.append(text.decode(runtime, 128, 12, visible=visible))
        runtime.close()
    assert torch.allclose(answers[1], answers[0], atol=1e-5)
    assert torch.allclose(answers[2], answers[0], atol=1e-5)


def test_the_device_tier_refuses_padding_behind_a_rows_beginning() -> None:
    text, runtime = Text(), make_runtime(KVSWAP, device_tier=True)
    visible = torch.ones(2, 600, dtype=torch.bool)
    visible[1, :10] = False
    text.feed(runtime, 0, 100, visible)
    text.decode(runtime, 100, 3, visible=visible)
    visible[1, 103:113] = False  # the second prompt is shorter in this row
    with pytest.raises(PromptError, match="padded behind its first token"):
        text.feed(runtime, 103, 130, visible)
    runtime.close()


def engines() -> tuple[TieredRuntime, TieredRuntime]:
    return make_runtime(LOUISKV), make_runtime(LOUISKV, device_tier=True)


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [1], [0, 1, 1]])
def test_what_was_retrieved_follows_the_rows(rows: list[int]) -> None:
    text, (host, device) = Text(batch=2), engines()
    for runtime in (host, device):
        text.feed(runtime, 0, 150)
    assert torch.allclose(text.decode(host, 150, 6), text.decode(device, 150, 6), atol=1e-5)
    for each in (text.keys, text.values, text.queries):
        each.set_(each[:, rows].contiguous())  # type: ignore[call-overload]
    for runtime in (host, device):
        runtime.select_rows(torch.tensor(rows))
    assert torch.allclose(text.decode(host, 156, 6), text.decode(device, 156, 6), atol=1e-5)
    layer = device.layers[1]
    assert isinstance(layer, DeviceLayer)
    assert (layer.unit_in >= 0).sum(dim=1).tolist() == [24] * len(layer.unit_in)


def test_a_step_that_failed_leaves_no_layer_without_what_it_retrieved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, (host, device) = Text(), engines()
    for runtime in (host, device):
        text.feed(runtime, 0, 150)
        text.decode(runtime, 150, 3)
    failing = device.layers[1]
    with monkeypatch.context() as patch:
        patch.setattr(failing, "attend", lambda _: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            text.feed(device, 153, 154)
    device.crop(153)
    host.crop(153)
    # Cropping forgets what was retrieved in layers that had the token; others go on with it.
    for runtime in (host, device):
        text.decode(runtime, 153, 2)
    for layer in device.layers:
        assert isinstance(layer, DeviceLayer)
        assert (layer.unit_in >= 0).sum(dim=1).tolist() == [24] * 4


def error(runtime: TieredRuntime, text: Text, start: int, steps: int = 8) -> float:
    """How far decoding is from full attention, as a share of its length."""
    total = 0.0
    for at in range(start, start + steps):
        old = (37 * at) % (start - 60) + 20
        # Each query head asks for one old token.
        asked = text.keys[:, :, :, old].repeat_interleave(2, dim=2)
        text.queries[:, :, :, at] = 4 * asked
        answer = text.feed(runtime, at, at + 1)[:, :, 0]
        keys, values = (
            each[:, :, :, : at + 1].repeat_interleave(2, dim=2) for each in (text.keys, text.values)
        )
        logits = (text.queries[:, :, :, at].unsqueeze(3) @ keys.transpose(3, 4)) * SCALING
        full = (logits.softmax(dim=4) @ values).squeeze(3)
        total += float((answer - full).norm() / full.norm())
    return total / steps


REFITTED: dict[str, SelectionPolicy] = {
    "kvswap": KVSwap(rank=12, predict=False, group_tokens=1, **BUDGET),
    "loki": Loki(predict=False, key_ratio=0.4, **BUDGET),
}


@pytest.mark.parametrize(
    ("name", "device_tier"), [("kvswap", False), ("kvswap", True), ("loki", False)]
)
def test_a_basis_is_of_this_text_and_not_of_a_first_word_or_another(
    name: str, device_tier: bool
) -> None:
    def fresh() -> TieredRuntime:
        return make_runtime(REFITTED[name], 1, device_tier=device_tier)

    text = Text(1, seed=1)
    runtime = fresh()
    text.feed(runtime, 0, 160)
    least = error(runtime, text, 160)
    assert least < 0.1

    other = Text(1, seed=2)
    turns = fresh()  # a greeting of another kind, then the text
    for each, there in ((text.keys, other.keys), (text.values, other.values)):
        each[:, :, :, :12] = there[:, :, :, :12]
    text.feed(turns, 0, 9)
    text.decode(turns, 9, 3)
    text.feed(turns, 12, 90)
    text.feed(turns, 90, 160)
    assert error(turns, text, 160) < least + 0.1

    answer = fresh()  # a greeting, and a long answer
    text.feed(answer, 0, 9)
    text.decode(answer, 9, 151)
    assert error(answer, text, 160) < least + 0.1

    again = fresh()
    other.feed(again, 0, 160)
    other.decode(again, 160, 2)
    again.reset()
    text.feed(again, 0, 160)
    assert error(again, text, 160) < least + 0.1
    for used in (runtime, turns, answer, again):
        used.close()


def test_a_basis_stays_while_a_chat_grows_by_little() -> None:
    text, runtime = Text(1), make_runtime(KVSWAP, 1)
    text.feed(runtime, 0, 300)
    text.decode(runtime, 300, 2)
    layer = runtime.layers[0]
    assert isinstance(layer, RetrievalLayer)
    made: list[int] = []
    index: Any = layer.index
    fit = index.fit

    def count(sample: Tensor, positions: Tensor) -> None:
        made.append(len(positions))
        fit(sample, positions)

    index.fit = count
    text.feed(runtime, 302, 400)
    text.decode(runtime, 400, 150)
    assert not made
    text.feed(runtime, 550, 600)
    runtime.crop(599)
    text.decode(runtime, 599, 1)
    assert made, "the text has doubled"
    runtime.close()


def test_queries_of_a_second_prompt_are_not_kept_where_nobody_wants_them() -> None:
    policy = InfiniGen(predict=False, **BUDGET)
    text, runtime = Text(1), make_runtime(policy, 1)
    text.feed(runtime, 0, 300)
    text.decode(runtime, 300, 2)
    text.feed(runtime, 302, 400)
    layer = runtime.layers[0]
    assert isinstance(layer, RetrievalLayer)
    assert layer._fit.queries is None
    text.decode(runtime, 400, 2)
    runtime.close()


@pytest.mark.parametrize(
    ("name", "batches", "share"),
    covering(
        ["kvswap", "loki", "shadowkv", "pqcache", "clusterkv", "louiskv"],
        [(1, 2), (2, 1), (4, 1)], [0.4, 0.6],
    ),
)  # fmt: skip
def test_another_batch_keeps_the_index_or_is_refused(
    name: str, batches: tuple[int, int], share: float
) -> None:
    before, after = batches
    limit = int(SHAPE.full_cache_bytes(max(batches), 4096) * share)
    text = Text(before, length=400)
    options: dict[str, Any] = {"limit_bytes": limit, "max_tokens": 4096, "must_tier": True}
    try:
        runtime = make_runtime(POLICIES[name](), before, **options)
    except BudgetError:
        pytest.skip("too little even for the first batch")
    text.feed(runtime, 0, 300)
    text.decode(runtime, 300, 2)
    rows = [row % before for row in range(after)]
    held = runtime.batch
    try:
        runtime.select_rows(torch.tensor(rows))
    except BudgetError:
        assert after > before, "a smaller batch fits"
        assert runtime.batch == held
        rows = list(range(before))
    for each in (text.keys, text.values, text.queries):
        each.set_(each[:, rows].contiguous())  # type: ignore[call-overload]
    assert text.decode(runtime, 302, 8).isfinite().all()
    assert runtime.batch == len(rows)
    runtime.close()
