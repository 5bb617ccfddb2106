"""GroupTensors: what a running group's kernels read, at addresses that stay for CUDA graphs."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.tree_work import PIECE_TOKENS, TreeWork, WorkPlan, most_rows_of, plan_work

Key = tuple[tuple[int, ...], ...]
"""Shapes of a group's tensors; groups of the same shapes share them, one after the other."""

_MOST_KEPT = 16
"""Of a GPU's, where each has a recorded graph; elsewhere the newest is kept."""
_FEWEST_WORKS = 16


@dataclass(frozen=True, slots=True)
class GroupTensors:
    """One group's table, lengths and work; int32 tensors on the device."""

    key: Key
    work: TreeWork
    lengths: Tensor
    """Tokens of each row that may be seen, the newest included. [rows]"""
    places: Tensor
    """One more than the position at which each row's newest token is written. [rows]"""

    @property
    def table(self) -> Tensor:
        """Slot of each row's i-th block. [rows, blocks]"""
        return self.work.table


class GroupTensorsCache:
    """Tensors of the shapes seen last; a group's content is copied into those of its shapes."""

    def __init__(self, block_tokens: int, device: torch.device) -> None:
        self._block_tokens = block_tokens
        self._device = device
        self._most_kept = _MOST_KEPT if device.type == "cuda" else 1
        self._kept: OrderedDict[Key, GroupTensors] = OrderedDict()

    @staticmethod
    def num_bytes(rows: int, width: int, block_tokens: int, device: torch.device) -> int:
        """Most bytes of the tensors of groups of up to `rows` rows with `width` blocks each."""
        kind = device.type
        piece = max(1, PIECE_TOKENS[kind] // block_tokens)
        # Runs of a tree are at most twice its leaves; a run's last piece may be short.
        works = max(_FEWEST_WORKS, rows * (-(-width // piece) + 2))
        parts = -(-width // piece) + rows
        lanes = most_rows_of(kind, rows, 1)
        one = 4 * (rows * (width + parts + 2) + works * (2 * lanes + 2))
        return 2 * one * _MOST_KEPT if kind == "cuda" else one

    def fill(
        self,
        table: NDArray[np.int32],
        paths: Sequence[NDArray[np.int64]],
        lengths: Sequence[int],
        ends: Sequence[int],
        *,
        queries_per_kv_head: int,
        share: bool,
    ) -> GroupTensors:
        """Tensors for a group.

        Args:
            table: slot of each row's i-th block. [rows, blocks]
            paths: blocks of each row to the end of the step.
            lengths: tokens of each row now.
            ends: and at the end of the step.
            queries_per_kv_head: of the model.
            share: blocks that several rows hold are attended to once for all of them.
        """
        kind = self._device.type
        plan = plan_work(
            paths, ends, self._block_tokens, share=share,
            most_rows=most_rows_of(kind, len(paths), queries_per_kv_head) if share else 1,
            piece_blocks=max(1, PIECE_TOKENS[kind] // self._block_tokens),
            pad_works=_FEWEST_WORKS if kind == "cuda" else 0,
        )  # fmt: skip
        return self._put(table, np.array(lengths, dtype=np.int32), plan)

    def _put(
        self, table: NDArray[np.int32], lengths: NDArray[np.int32], plan: WorkPlan
    ) -> GroupTensors:
        key = (table.shape, plan.rows.shape, plan.parts.shape)
        if key not in self._kept:
            self._kept[key] = self._make(key, table, plan)
            while len(self._kept) > self._most_kept:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        tensors = self._kept[key]
        tensors.table.copy_(torch.from_numpy(table))
        tensors.work.fill(plan)
        tensors.lengths.copy_(torch.from_numpy(lengths))
        tensors.places.copy_(torch.from_numpy(lengths))
        return tensors

    def _make(self, key: Key, table: NDArray[np.int32], plan: WorkPlan) -> GroupTensors:
        there = torch.from_numpy(table).to(self._device)
        lengths = torch.zeros(table.shape[0], dtype=torch.int32, device=self._device)
        return GroupTensors(key, TreeWork.of(plan, there), lengths, torch.zeros_like(lengths))
