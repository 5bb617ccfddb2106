"""MirroredRuntime: the tiers of a cache, compared with plain tensors at every step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.core.shape import KVShape
from penstock.engine.attention_call import AttentionCall
from penstock.engine.policy import SelectionPolicy
from penstock.engine.runtime_settings import RuntimeSettings
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.kernels.plain_attention import attention_twin

SCALING = 0.25
SHAPE = KVShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
TOLERANCE = 2e-5
"""Most that two outputs differ by."""


def make_runtime(policy: SelectionPolicy, batch: int, **settings: Any) -> TieredRuntime:
    """A runtime on a CPU with its store in memory and no limit, where `settings` say nothing else.

    Args:
        settings: fields of `RuntimeSettings`.
    """
    plain: dict[str, Any] = {
        "shape": SHAPE, "limit_bytes": None, "store": "memory", "max_tokens": 128, "exact": False,
        "adapter": None, "device": torch.device("cpu"),
    }  # fmt: skip
    return TieredRuntime(RuntimeSettings(policy=policy, **(plain | settings)), batch)


class MirroredRuntime:
    """A runtime and the same random tokens in plain tensors.

    Every step attends both ways and raises AssertionError where the outputs differ. That holds for
    policies that select everything: units then partition the past, or a token is missing or twice.

    Attributes:
        runtime: the tiers
        padding: tokens before the first one of each row. int64 [batch]
        kv: keys and values of each layer, both [batch, kv_heads, tokens, width].
    """

    def __init__(self, runtime: TieredRuntime, padding: Sequence[int], seed: int = 0) -> None:
        """Begin with no token, in as many rows as there are paddings."""
        self.runtime = runtime
        self.random = torch.Generator().manual_seed(seed)
        self.padding = torch.tensor(padding)
        shape = self._shape = runtime.settings.shape
        size, widths = (len(padding), shape.num_kv_heads, 0), (shape.head_dim, shape.value_width)
        keys, values = (torch.zeros(*size, width) for width in widths)
        self.kv = [(keys, values)] * shape.num_layers

    @property
    def length(self) -> int:
        """Tokens of a row in plain tensors, padding included."""
        return min(keys.shape[2] for keys, _ in self.kv)

    def step(self, count: int, *, predict: bool = False) -> None:
        """Take `count` random tokens in, in every layer, and compare what each attends to.

        Args:
            predict: begin the fetch of each next layer with a random query.
        """
        batch, total, shape = len(self.padding), self.length + count, self._shape
        visible = torch.arange(total) >= self.padding[:, None]
        shown = None if bool(visible.all()) else visible
        causal = torch.ones(count, total, dtype=torch.bool).tril(total - count)
        for layer in range(shape.num_layers):
            following = layer + 1
            predict = predict and following < shape.num_layers
            if predict and self.runtime.wants_query(following):
                self.runtime.begin_fetch(following, self._randn(batch, shape.num_query_heads))
            query = self._randn(batch, shape.num_query_heads, count)
            keys = self._randn(batch, shape.num_kv_heads, count)
            values = self._randn(batch, shape.num_kv_heads, count, width=shape.value_width)
            if shape.values_in_keys:
                values = keys[..., : shape.value_width]
            call = AttentionCall(query, keys, values, SCALING, visible=shown)
            actual = self.runtime.attend(layer, call).transpose(1, 2)
            held = zip(self.kv[layer], (keys, values), strict=True)
            before, after = (torch.cat(both, dim=2) for both in held)
            self.kv[layer] = before, after
            mask = causal & visible[:, None, None]
            expected, _ = attention_twin(query, *self.kv[layer], scaling=SCALING, mask=mask)
            seen = visible[:, -count:, None].unsqueeze(1)  # what padding sees does not matter
            difference = (actual - expected).masked_fill(~seen, 0.0).abs().max().item()
            assert difference < TOLERANCE, (
                f"layer {layer} is off by {difference:.2g} after {count} of {total} tokens: "
                "a past token is missing or is attended to twice"
            )

    def _randn(self, *size: int, width: int | None = None) -> Tensor:
        return torch.randn(*size, width or self._shape.head_dim, generator=self.random)

    def decode(self, steps: int, *, predict: bool = False) -> None:
        """Take in one token at a time."""
        for _ in range(steps):
            self.step(1, predict=predict)

    def crop(self, length: int) -> None:
        """Forget the tokens at and after `length`."""
        self.runtime.crop(length)
        self.kv = [(keys[:, :, :length], values[:, :, :length]) for keys, values in self.kv]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i what row `rows[i]` was; the batch may grow or shrink."""
        self.runtime.select_rows(torch.tensor(rows))
        self.kv = [(keys[list(rows)], values[list(rows)]) for keys, values in self.kv]
        self.padding = self.padding[torch.tensor(rows)]
