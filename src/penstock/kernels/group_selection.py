"""GroupSelection: the best groups for a query by low-rank codes, in one call."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.kernels.group_products import group_products
from penstock.kernels.group_scores import (
    compiled_scratch_bytes,
    group_scores,
    is_compiled,
    scores_of_shares,
)
from penstock.kernels.key_rotation import KeyTurns
from penstock.kernels.low_rank import fits_compiled, fits_turned, project_queries
from penstock.kernels.native.compiled import address, kernel
from penstock.kernels.native.dtype_codes import DTYPE_CODES
from penstock.kernels.top_units import favour_resident, top_units


class _Codes(ctypes.Structure):
    """`penstock_codes` of native/steps.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("basis", "factor", "codes")),
        *((name, ctypes.c_int64) for name in (
            "row_bytes", "kv_heads", "share", "dim", "rank", "kind", "group_tokens",
            "block_groups", "width", "bits", "squares",
        )),
        ("turns", ctypes.c_void_p),
    )  # fmt: skip


class GroupSelection:
    """`project_queries`, `group_scores` and `top_units` with a layer's codes and basis at hand.

    One call for the three, for the reason that `PredictedQuery` gives.
    """

    def __init__(
        self, codes: Tensor, basis: Tensor, factor: Tensor, bits: int, heads: int, kv_heads: int,
        turns: KeyTurns | None = None, *, squares: bool = False,
    ) -> None:  # fmt: skip
        """Look at an index's memory, which is filled and changed elsewhere but stays where it is.

        Args:
            codes: as in `group_scores`. [batch, blocks, group_tokens, block_groups, width]
            basis: as in `project_queries`. [kv_heads * head_dim, rank]
            factor: float32, on low-rank queries. [rank]
            heads: query heads.
            turns: what turns the keys that the codes are of, and the queries with them.
            squares: as in `group_scores`.

        Raises:
            ConfigError: these do not belong together; the compiled calls read as far as they say.
        """
        rank, width = basis.shape[1], codes.shape[-1]
        if (
            heads % kv_heads or basis.shape[0] % kv_heads or factor.shape != (rank,)
            or factor.dtype != torch.float32 or not codes.is_contiguous()
            or not factor.is_contiguous() or width != (-(-rank // 2) if bits == 4 else rank)
        ):  # fmt: skip
            raise ConfigError(
                f"codes {list(codes.shape)} of {bits} bits, a basis {list(basis.shape)} and "
                f"{list(factor.shape)} factors do not belong together; make the index again"
            )
        self._codes, self._basis, self._factor, self._bits = codes, basis, factor, bits
        self._heads, self._kv_heads, self._squares = heads, kv_heads, squares
        self._dim, self._rank = basis.shape[0] // kv_heads, basis.shape[1]
        self._query_shape = (heads, self._dim)
        self._rows, self._most_groups = len(codes), codes.shape[1] * codes.shape[3]
        self._kernel, self._turns, self._compiled_turns = None, turns, None
        if not is_compiled(codes, bits):
            return
        if turns is None and not fits_compiled(basis, self._dim):
            return
        if turns is not None:
            if not fits_turned(basis):
                return
            self._compiled_turns = turns.compiled(self._dim, codes.shape[2])
            assert codes.shape[1] * codes.shape[3] <= turns.num_blocks * self._block_groups
        self._kernel = kernel("select_groups")
        blocks, group_tokens, block_groups, width = codes.shape[1:]
        self._index = _Codes(
            basis=basis.data_ptr(), factor=factor.data_ptr(), codes=codes.data_ptr(),
            row_bytes=blocks * group_tokens * block_groups * width, kv_heads=kv_heads,
            share=heads // kv_heads, dim=self._dim, rank=self._rank,
            kind=DTYPE_CODES[basis.dtype], group_tokens=group_tokens, block_groups=block_groups,
            width=width, bits=bits, squares=squares,
            turns=None if self._compiled_turns is None else self._compiled_turns.address,
        )  # fmt: skip
        self._address = ctypes.addressof(self._index)

    @property
    def is_compiled(self) -> bool:
        """Whether `best` is one call; otherwise it needs memory for all groups' logits."""
        return self._kernel is not None

    @property
    def compiled_index(self) -> int | None:
        """Address of what the compiled calls know of the index; None where they cannot be used."""
        return None if self._kernel is None else self._address

    @property
    def dtype(self) -> torch.dtype:
        """Of queries that the compiled calls take."""
        return self._basis.dtype

    def scratch_bytes(self, num_groups: int) -> int:
        """Memory that a compiled call wants."""
        scores = compiled_scratch_bytes(num_groups, int(self._index.width))
        if self._compiled_turns is not None:
            scores += self._compiled_turns.scratch_bytes(self._rank)
        return 4 * self._heads * self._rank + 8 * num_groups + scores

    def best(
        self, query: Tensor, first: int, num_groups: int, wanted: int,
        resident: NDArray[np.int32] | None = None, resident_factor: float = 1.0,
    ) -> NDArray[np.int64]:  # fmt: skip
        """The highest-scoring groups among [first, num_groups); the compiled form of `twin`.

        Args:
            query: [batch, heads, head_dim]
            wanted: at least 1; all are taken where there are fewer.
            resident: groups whose scores are multiplied by `resident_factor`, -1 for none.
                [batch, any number]

        Returns:
            Ascending in each row. [batch, min(wanted, num_groups - first)]
        """
        count = min(wanted, num_groups - first)
        if self._kernel is None or count <= 0 or query.dtype != self._basis.dtype:
            return self.twin(query, first, num_groups, wanted, resident, resident_factor)
        self.require(query, first, num_groups)
        query = query.contiguous()
        chosen = np.empty((len(query), count), dtype=np.int64)
        scratch = np.empty(self.scratch_bytes(num_groups), dtype=np.uint8)
        known = None if resident is None else np.ascontiguousarray(resident, dtype=np.int32)
        assert known is None or len(known) == len(query), "one row of them for each of queries"
        self._kernel(
            self._address, query.data_ptr(), len(query), first, num_groups, count,
            None if known is None else address(known), 0 if known is None else known.shape[1],
            resident_factor, address(scratch), address(chosen),
        )  # fmt: skip
        return chosen

    @property
    def _block_groups(self) -> int:
        """Groups of a block of keys."""
        assert self._turns is not None
        return self._turns.block_tokens // self._codes.shape[2]

    def scores(self, query: Tensor, num_groups: int, first: Tensor | None = None) -> Tensor:
        """As `group_scores`, of a query; where keys are turned and `is_compiled`.

        Args:
            query: as if each row's text began at its first place. [batch, heads, head_dim]
            first: as there. int64 [batch]
        """
        compiled = kernel("turned_scores")
        assert compiled is not None, "as compiled as the rest"
        query, scratch = self._turned_call(query, num_groups)
        scores = torch.empty(len(query), num_groups)
        begins = [0] * len(query) if first is None else first.tolist()
        for row, begin in enumerate(begins):
            compiled(
                self._address, self._codes[row].data_ptr(), query[row].data_ptr(), begin,
                num_groups, scratch.data_ptr(), scores[row].data_ptr(),
            )  # fmt: skip
        return scores

    def logits(self, query: Tensor, num_groups: int) -> Tensor:
        """Each group's largest product per head; where keys are turned and `is_compiled`.

        Args:
            query: as for `scores`. [batch, heads, head_dim]

        Returns:
            float32 [batch, num_groups, heads]
        """
        compiled = kernel("turned_logits")
        assert compiled is not None, "as compiled as the rest"
        query, scratch = self._turned_call(query, num_groups)
        logits = torch.empty(len(query), num_groups, self._heads)
        for row in range(len(query)):
            compiled(
                self._address, self._codes[row].data_ptr(), query[row].data_ptr(), num_groups,
                scratch.data_ptr(), logits[row].data_ptr(),
            )  # fmt: skip
        return logits

    def _turned_call(self, query: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
        """A query as the compiled calls read it, and their scratch."""
        assert self._compiled_turns is not None, "keys that are turned are wanted"
        self.require(query, 0, num_groups)
        scratch = torch.empty(self.scratch_bytes(num_groups), dtype=torch.uint8)
        return query.to(self._basis.dtype).contiguous(), scratch

    def require(self, query: Tensor, first: int, num_groups: int) -> None:
        """A compiled call reads no further than the codes and the query are."""
        assert query.shape[1:] == self._query_shape, query.shape
        assert len(query) <= self._rows, query.shape
        assert 0 <= first <= num_groups <= self._most_groups, (first, num_groups)

    def twin(
        self, query: Tensor, first: int, num_groups: int, wanted: int,
        resident: NDArray[np.int32] | None = None, resident_factor: float = 1.0,
    ) -> NDArray[np.int64]:  # fmt: skip
        """The meaning of `best`: one step after the other."""
        scores = self._scores_in_steps(query, num_groups)
        if resident is not None:
            is_resident = np.zeros((len(resident), num_groups + 1), dtype=np.bool_)
            known = np.where((resident < 0) | (resident >= num_groups), num_groups, resident)
            np.put_along_axis(is_resident, known, True, axis=1)
            scores = favour_resident(scores, is_resident[:, :-1], resident_factor)
        return top_units(scores, first, wanted)

    def _scores_in_steps(self, query: Tensor, num_groups: int) -> Tensor:
        if self._turns is not None:
            blocks, block_groups = -(-num_groups // self._codes.shape[3]), self._codes.shape[3]
            end = blocks * block_groups // self._block_groups
            parts = self._turns.queries(query, self._basis, self._kv_heads, self._factor, 0, end)
            logits = group_products(self._codes[: len(query), :blocks], parts, self._bits)
            return scores_of_shares(logits, num_groups, squares=self._squares)
        low_rank = project_queries(query, self._basis, self._kv_heads, self._factor)
        codes = self._codes[: len(query)]
        return group_scores(codes, low_rank, self._bits, num_groups, squares=self._squares)
