"""A padded row selects what it selects alone, whatever is padding and when."""

import pytest
import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.engine.adapter import fit_layer
from penstock.engine.attention_call import AttentionCall
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.methods import KVSwap, SelectionPolicy
from penstock.methods.hillinfer.policy import HillInfer

SHAPE = KVShape(num_layers=1, num_query_heads=8, num_kv_heads=2, head_dim=16, dtype=torch.float32)
TOKENS, PADDING, STEPS = 300, 200, 8


@pytest.mark.parametrize("device_tier", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_padding_has_no_share_of_the_scores(batch: int, device_tier: bool) -> None:
    random = torch.Generator().manual_seed(1)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=random)

    policy = KVSwap(
        selected_tokens=24, window_tokens=8, rank=16, index_bits=8, predict=False,
        reuse_tokens=24,
    )  # fmt: skip
    adapter = [fit_layer(randn(500, SHAPE.joint_dim), 16)]
    config = RuntimeSettings(
        shape=SHAPE, policy=policy, limit_bytes=None, store="memory", max_tokens=400, exact=False,
        adapter=adapter, device=torch.device("cpu"), device_tier=device_tier,
    )  # fmt: skip
    together, alone = TieredRuntime(config, batch), TieredRuntime(config, 1)
    visible = torch.ones(batch, TOKENS + STEPS, dtype=torch.bool)
    visible[-1, :PADDING] = False
    for step in range(STEPS):
        new = TOKENS if step == 0 else 1
        query, keys = 3 * randn(batch, 8, new, 16), randn(batch, 2, new, 16)
        if step == 0:
            keys[-1, :, :PADDING] *= 3
        values, own = randn(batch, 2, new, 16), min(new, TOKENS - PADDING)
        shown = visible[:, : TOKENS + step]
        left = together.attend(0, AttentionCall(query, keys, values, 0.25, visible=shown))
        parts = (query[-1:, :, -own:], keys[-1:, :, -own:], values[-1:, :, -own:])
        right = alone.attend(0, AttentionCall(*parts, 0.25, visible=None))
        assert (left[-1, -own:] - right[0]).abs().max().item() < 1e-4, step
    for runtime in (together, alone):
        runtime.close()


EVERYTHING = KVSwap(selected_tokens=160, window_tokens=8, rank=4, sink_tokens=4, predict=False)
"""Selects whatever there is, so that its answers are those of full attention."""


class Rows:
    """A cache that selects everything, beside all that it was given."""

    def __init__(self, policy: SelectionPolicy, batch: int = 2) -> None:
        self._draw = torch.Generator().manual_seed(0)
        self.runtime = TieredRuntime(
            RuntimeSettings(
                shape=SHAPE, policy=policy, limit_bytes=None, store="memory", max_tokens=160,
                exact=False, adapter=None, device=torch.device("cpu"), must_tier=True,
            ),
            batch,
        )  # fmt: skip
        self.given = torch.zeros(2, batch, 2, 0, 16)
        self.visible = torch.zeros(batch, 0, dtype=torch.bool)

    def crop(self, length: int) -> None:
        self.runtime.crop(length)
        self.given, self.visible = self.given[:, :, :, :length], self.visible[:, :length]

    def feed(self, shown: Tensor) -> float:
        """Feed tokens; returns how far rows that see something are from full attention.

        Args:
            shown: which of them are no padding. [batch, tokens]
        """
        batch, tokens = shown.shape
        query = torch.randn(batch, 8, tokens, 16, generator=self._draw)
        new = torch.randn(2, batch, 2, tokens, 16, generator=self._draw)
        self.given = torch.cat([self.given, new], dim=3)
        self.visible = torch.cat([self.visible, shown], dim=1)
        call = AttentionCall(query, new[0], new[1], 0.25, visible=self.visible)
        out = self.runtime.attend(0, call).transpose(1, 2)
        keys, values = self.given.repeat_interleave(4, dim=2)
        length = keys.shape[2]
        mask = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
        mask = mask & self.visible[:, None]
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask[:, None], scale=0.25
        )
        seen = mask.any(dim=-1)[:, None, :, None]
        return float(((out - wanted) * seen).nan_to_num(0).abs().max())


@pytest.mark.parametrize("policy", [EVERYTHING, HillInfer(selected_tokens=160, window_tokens=8)])
def test_a_row_may_be_done_while_others_decode(policy: SelectionPolicy) -> None:
    """A step that is padding in one row costs the other none of what it selects."""
    rows = Rows(policy)
    rows.feed(torch.ones(2, 60, dtype=torch.bool))
    for step in range(40):
        shown = torch.tensor([[True], [step % 7 < 2]])
        assert rows.feed(shown) < 1e-4, step
    rows.runtime.close()


def test_a_row_of_which_only_padding_is_left_begins_anew() -> None:
    rows = Rows(EVERYTHING)
    shown = torch.ones(2, 60, dtype=torch.bool)
    shown[1, :50] = False
    rows.feed(shown)
    rows.crop(30)
    for step in range(50):
        assert rows.feed(torch.ones(2, 1, dtype=torch.bool)) < 1e-4, step
    rows.runtime.close()
