"""Random trees of blocks, and what attention over them has to say."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.plain_attention import attention_twin
from penstock.kernels.tree_work import TreeWork, plan_work

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class TreeCase:
    """Random blocks in random slots of one layer of a larger tensor, with a plan of the work."""

    def __init__(
        self,
        blocks: list[list[int]],
        *,
        kv_heads: int = 2,
        queries: int = 2,
        dim: int = 32,
        block_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        share: bool = True,
        most_rows: int = 4,
        piece_blocks: int = 2,
        pad_works: int = 0,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        whole = [block_tokens * len(held) for held in blocks]
        at_end = [int(rng.integers(n - block_tokens + 1, n + 1)) if n else 0 for n in whole]
        # Some blocks may be for tokens that are yet to come.
        now = [int(rng.integers(max(0, n - 2 * block_tokens), n + 1)) if n else 0 for n in at_end]
        ids = sorted({i for row in blocks for i in row})
        num_slots = len(ids) + 3
        slot = dict(zip(ids, rng.permutation(num_slots)[: len(ids)].tolist(), strict=True))
        shape = (num_slots, 3, 2, kv_heads, block_tokens, dim)
        self.layers = torch.randn(shape, generator=generator).to(device, dtype)
        self.slots = self.layers[:, 1]
        table = np.full((len(blocks), max(1, *map(len, blocks), 1)), num_slots - 1, dtype=np.int32)
        for row, held in enumerate(blocks):
            table[row, : len(held)] = [slot[i] for i in held]
        self.lengths = torch.tensor(now, dtype=torch.int32, device=device)
        self.query = torch.randn(len(blocks), kv_heads * queries, dim, generator=generator)
        self.query = self.query.to(device, dtype)
        self.plan = plan_work(
            [np.array(held, dtype=np.int64) for held in blocks], at_end, block_tokens,
            share=share, most_rows=most_rows, piece_blocks=piece_blocks, pad_works=pad_works,
        )  # fmt: skip
        self.work = TreeWork.of(self.plan, torch.from_numpy(table).to(device))
        self.scaling = dim**-0.5

    @staticmethod
    def paths(seed: int, num_rows: int, depth: int) -> list[list[int]]:
        """Block ids of rows that fork now and then; the same block means the same prefix."""
        rng = np.random.default_rng(seed)
        fresh = itertools.count()
        rows: list[list[int]] = [[next(fresh) for _ in range(rng.integers(0, depth + 1))]]
        while len(rows) < num_rows:
            parent = rows[rng.integers(len(rows))]
            kept = parent[: rng.integers(0, len(parent) + 1)]
            new = rng.integers(0, depth + 1 - len(kept))
            rows.append(kept + [next(fresh) for _ in range(new)])
        return rows

    def spoil_unwritten(self) -> None:
        """Make not-a-number of every place that no row has written yet."""
        tokens = self.slots.shape[3]
        written = torch.zeros(len(self.slots), tokens, dtype=torch.bool)
        table = self.work.table.tolist()
        for row, length in enumerate(self.lengths.tolist()):
            for position in range(length):
                written[table[row][position // tokens], position % tokens] = True
        self.slots.masked_fill_(~written[:, None, None, :, None].to(self.slots.device), math.nan)

    def expected(self, softcap: float | None, window: int | None) -> tuple[Tensor, Tensor]:
        """Plain attention, row by row, over the tokens that the row sees and no others."""
        outs, lses = [], []
        table, slots = self.work.table.cpu().long(), self.slots.cpu()
        for row, length in enumerate(self.lengths.tolist()):
            if length == 0:
                outs.append(torch.zeros(self.query.shape[1:]))
                lses.append(torch.full(self.query.shape[1:2], -math.inf))
                continue
            held = slots[table[row]].permute(1, 2, 0, 3, 4).flatten(2, 3)
            first = 0 if window is None else max(0, length - window)
            keys, values = held[:, None, :, first:length]
            out, lse = attention_twin(
                self.query[row].cpu()[None, :, None], keys, values,
                scaling=self.scaling, softcap=softcap,
            )  # fmt: skip
            outs.append(out[0, :, 0])
            lses.append(lse[0, :, 0])
        return torch.stack(outs), torch.stack(lses)

    def check(
        self, attention: Any, softcap: float | None = None, window: int | None = None, **more: Any
    ) -> None:
        """Whether a form of `tree_attention` says what is expected."""
        out, lse = attention(
            self.query, self.slots, self.work, self.lengths, self.scaling,
            softcap=softcap, window=window, **more,
        )  # fmt: skip
        expected_out, expected_lse = self.expected(softcap, window)
        assert out.dtype == self.query.dtype
        assert out.shape == self.query.shape
        assert lse.dtype == torch.float32
        tolerance = TOLERANCE[self.query.dtype]
        torch.testing.assert_close(out.float().cpu(), expected_out, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-4, atol=tolerance)


@pytest.fixture(scope="session")
def tree_case() -> type[TreeCase]:
    """The class of random trees, for tests to make their own."""
    return TreeCase
