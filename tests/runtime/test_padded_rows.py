"""KVSwap: a padded row selects what it selects alone, whatever the padding's keys are."""

import pytest
import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.indexes.adapter import fit_layer
from penstock.policies import KVSwap
from penstock.runtime.attention_call import AttentionCall
from penstock.runtime.runtime_config import RuntimeConfig
from penstock.runtime.tiered_runtime import TieredRuntime

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
    config = RuntimeConfig(
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
