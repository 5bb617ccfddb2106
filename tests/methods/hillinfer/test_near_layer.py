"""HillInfer over a device: scores are shares of the softmax; fewer rows read what was there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods.hillinfer.layer import NearLayer
from penstock.methods.hillinfer.near_storage.scorer import LocalScorer
from penstock.methods.hillinfer.policy import HillInfer
from penstock.testing.pairs import covering

SHAPE = KVShape(num_layers=1, num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)
SCALING = 0.125


@contextmanager
def runtime_of(batch: int, max_tokens: int, store: str, **options: Any) -> Iterator[TieredRuntime]:
    config = RuntimeSettings(
        shape=SHAPE, policy=HillInfer(alpha=0.1, window_tokens=16, **options), limit_bytes=None,
        store=store, max_tokens=max_tokens, exact=False, adapter=None,
        device=torch.device("cpu"), must_tier=True,
    )  # fmt: skip
    runtime = TieredRuntime(config, batch)
    try:
        yield runtime
    finally:
        runtime.close()


class Draw:
    """Random tensors, the same each time."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *size: int) -> Tensor:
        return torch.randn(*size, SHAPE.head_dim, generator=self._generator)


@pytest.mark.parametrize(
    ("near", "sinks", "padding", "host_memory"),
    covering([False, True], [0, 4], [0, 40], [None, "1MiB"]),
)
def test_scores_are_shares_of_the_softmax(
    near: bool, sinks: int, padding: int, host_memory: str | None
) -> None:
    draw, prompt = Draw(), 300
    keys, values = draw(2, 2, prompt), draw(2, 2, prompt)
    keys[:, :, :4] *= 4  # sinks weigh much, and so does what stands in the padding's place
    visible = torch.arange(prompt + 3) >= torch.tensor([0, padding])[:, None]
    options = {"near": near, "hot_tokens": 60, "sink_tokens": sinks, "host_memory": host_memory}
    with runtime_of(2, 400, "memory", **options) as runtime:

        def attend(query: Tensor, keys: Tensor, values: Tensor, length: int) -> None:
            shown = visible[:, :length] if padding else None
            runtime.attend(0, AttentionCall(query, keys, values, SCALING, visible=shown))

        attend(draw(2, 4, prompt), keys, values, prompt)
        for length in range(prompt, prompt + 3):
            query, key, value = draw(2, 4, 1), draw(2, 2, 1), draw(2, 2, 1)
            attend(query, key, value, length + 1)
            logits = torch.einsum("bhqd,bhtd->bhqt", query.view(2, 2, 2, -1), keys) * SCALING
            logits = logits.masked_fill(~visible[:, None, None, :length], -torch.inf)
            expected = logits.softmax(dim=3).sum(dim=(1, 2)).numpy()
            layer = runtime.layers[0]
            assert isinstance(layer, NearLayer)
            end = layer.window.first_window_unit(length + 1) - 8
            for row, first in enumerate(layer._first_unit.tolist()):
                found = layer.near.scores[row, first:end]
                np.testing.assert_allclose(found, expected[row, first:end], rtol=0.06)
                assert (layer.near.scores[row, :first] == -np.inf).all()
            keys = torch.cat([keys, key], dim=2)


class Restarting(LocalScorer):
    """Forgets which tokens are hot when its generation has been looked at a few times."""

    looks = 0

    @property
    def generation(self) -> int:
        self.looks -= 1
        if self.looks == -1:
            none = np.zeros(0, dtype=np.int64)
            self._keys[0].change(none, none, reset=True)
        return 1 if self.looks >= 0 else 2

    @generation.setter
    def generation(self, value: int) -> None:
        raise AssertionError("nobody sets it")


@pytest.mark.parametrize("looks", [0, 1, 2, 3, 4])
def test_a_device_may_start_again_at_any_moment(looks: int) -> None:
    """No token is without a score, and shares are right as soon as the device was told."""
    draw, prompt = Draw(), 300
    keys, values = draw(1, 2, prompt), draw(1, 2, prompt)
    with runtime_of(1, 400, "memory", near=False, hot_tokens=40) as runtime:
        runtime.attend(0, AttentionCall(draw(1, 4, prompt), keys, values, SCALING))
        layer = runtime.layers[0]
        assert isinstance(layer, NearLayer)
        for step in range(24):  # a token that has just left the window is hot, and cold again later
            query, key, value = draw(1, 4, 1), draw(1, 2, 1), draw(1, 2, 1)
            if step == 2:
                scorer: Any = layer.near._shown.scorer
                scorer.__class__, scorer.looks = Restarting, looks
            runtime.attend(0, AttentionCall(query, key, value, SCALING))
            logits = torch.einsum("bhqd,bhtd->bhqt", query.view(1, 2, 2, -1), keys) * SCALING
            expected = logits.softmax(dim=3).sum(dim=(1, 2)).numpy()
            first, end = (
                int(layer._first_unit[0]),
                layer.window.first_window_unit(prompt + step + 1),
            )
            found = layer.near.scores[:, first : end - 8]
            assert np.isfinite(found).all()
            if step < 2 or step > 6 or looks == 0:
                np.testing.assert_allclose(found, expected[:, first : end - 8], rtol=0.06)
            keys = torch.cat([keys, key], dim=2)


@pytest.mark.parametrize("rows", [[3], [0, 3, 5, 6]])
def test_fewer_rows_are_read_through_smaller_sections(rows: list[int], tmp_path: Path) -> None:
    draw, prompt = Draw(), 800
    with runtime_of(8, 900, str(tmp_path), hot_tokens=400) as runtime:
        keys, values = draw(8, 2, prompt), draw(8, 2, prompt)
        runtime.attend(0, AttentionCall(draw(8, 4, prompt), keys, values, SCALING))
        store: Any = runtime._store
        before = store.devices[0].settings.section_bytes
        runtime.select_rows(torch.tensor(rows))
        assert store.devices[0].settings.section_bytes < before
        held = runtime.read_tokens(0, 0, prompt)
        assert torch.equal(held, torch.stack([keys, values])[:, rows].permute(1, 3, 0, 2, 4))
