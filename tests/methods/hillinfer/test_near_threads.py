"""A hot and cold layer is evaluated beside the one that is computed: they share the staging."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.core.errors import CacheStateError, StoreFullError
from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.slot_transfer import SlotTransfer
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods.hillinfer.layer import NearLayer
from penstock.methods.hillinfer.policy import HillInfer

SHAPE = KVShape(num_layers=4, num_query_heads=4, num_kv_heads=2, head_dim=24, dtype=torch.float32)
BATCH, PROMPT, STEPS = 2, 300, 60
POLICY = HillInfer(alpha=0.1, near=False, hot_tokens=200, window_tokens=16, sink_tokens=4)


def test_what_one_layer_writes_is_not_read_over_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: Any = SlotTransfer._queue

    def dawdle(self: SlotTransfer, *args: Any) -> Any:
        time.sleep(0.002)  # as if the interpreter went to the other thread here
        return queue(self, *args)

    monkeypatch.setattr(SlotTransfer, "_queue", dawdle)
    config = RuntimeSettings(
        shape=SHAPE, policy=POLICY, limit_bytes=None, store=str(tmp_path),
        max_tokens=PROMPT + STEPS, exact=False, adapter=None, device=torch.device("cpu"),
        must_tier=True,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)

    def normal(heads: int, tokens: int) -> Tensor:
        return torch.randn(BATCH, heads, tokens, SHAPE.head_dim, generator=draw)

    given: list[list[Tensor]] = [[] for _ in range(SHAPE.num_layers)]
    runtime = TieredRuntime(config, BATCH)
    try:
        assert runtime.plan.staging_slots, "units that fill no sector pass through the staging"

        def attend(layer: int, query: Tensor, tokens: int) -> None:
            keys, values = normal(2, tokens), normal(2, tokens)
            given[layer].append(torch.stack([keys, values]))
            runtime.attend(layer, AttentionCall(query, keys, values, SHAPE.head_dim**-0.5))

        for layer in range(SHAPE.num_layers):
            attend(layer, normal(4, PROMPT), PROMPT)
        for _ in range(STEPS):
            queries = [normal(4, 1) for _ in range(SHAPE.num_layers)]
            for layer in range(SHAPE.num_layers):
                if layer + 1 < SHAPE.num_layers and runtime.wants_query(layer + 1):
                    runtime.begin_fetch(layer + 1, queries[layer + 1][:, :, 0])
                attend(layer, queries[layer], 1)
        for layer, parts in enumerate(given):
            held = runtime.read_tokens(layer, 0, PROMPT + STEPS)
            assert torch.equal(held, torch.cat(parts, dim=3).permute(1, 3, 0, 2, 4)), layer
    finally:
        runtime.close()


def test_threads_of_another_batch_end_with_it() -> None:
    """At once, not when somebody collects the garbage."""
    config = RuntimeSettings(
        shape=SHAPE, policy=POLICY, limit_bytes=None, store="memory", max_tokens=PROMPT + STEPS,
        exact=False, adapter=None, device=torch.device("cpu"), must_tier=True,
    )  # fmt: skip
    runtime = TieredRuntime(config, BATCH)

    def step(batch: int, tokens: int) -> int:
        for layer in range(SHAPE.num_layers):
            query, keys = (torch.randn(batch, heads, tokens, SHAPE.head_dim) for heads in (4, 2))
            runtime.attend(layer, AttentionCall(query, keys, keys.clone(), 0.25))
        # Threads of others, which end meanwhile, are not counted.
        return sum(each.name.startswith("penstock-near") for each in threading.enumerate())

    gc.disable()
    try:
        step(BATCH, 60)
        running = step(BATCH, 1)
        assert running
        for batch in (3, 1, 4):
            runtime.select_rows(torch.zeros(batch, dtype=torch.int64))
            assert step(batch, 1) == running
    finally:
        gc.enable()
        runtime.close()


def test_a_write_that_failed_is_told_though_its_step_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The evaluation hears of it, and nobody attends to the evaluation."""
    policy = HillInfer(selected_tokens=8, window_tokens=8, hot_tokens=16)
    config = RuntimeSettings(
        shape=SHAPE.of_layers(1), policy=policy, limit_bytes=None, store="memory", max_tokens=200,
        exact=False, adapter=None, device=torch.device("cpu"), must_tier=True,
    )  # fmt: skip
    runtime, draw = TieredRuntime(config, 1), torch.Generator().manual_seed(0)

    def feed(tokens: int) -> None:
        query, keys, values = (
            torch.randn(1, heads, tokens, SHAPE.head_dim, generator=draw) for heads in (4, 2, 2)
        )
        runtime.attend(0, AttentionCall(query, keys, values, 0.25))

    try:
        for tokens in (60, 1, 1):
            feed(tokens)
        layer = runtime.layers[0]
        assert isinstance(layer, NearLayer)
        layer.drain()

        def refuse(*_: Any) -> None:
            raise StoreFullError("no room on purpose")

        monkeypatch.setattr(layer.transfer.region.file, "write_at", refuse)
        feed(1)
        runtime.begin_fetch(0, torch.randn(1, 4, SHAPE.head_dim, generator=draw))
        assert layer._begun is not None
        assert isinstance(layer._begun.exception(), StoreFullError)
        monkeypatch.undo()
        with pytest.raises(StoreFullError, match="on purpose"):
            feed(3)
        with pytest.raises(CacheStateError, match="lost"):
            feed(1)
        runtime.reset()
        feed(20)
    finally:
        runtime.close()
