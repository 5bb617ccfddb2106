"""ShadowKeyIndex: landmarks, outliers, and low-rank pre-RoPE keys that keys are rebuilt from."""

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.shape import KVShape
from penstock.engine.adapter import fit_basis
from penstock.engine.key_index import KeyIndex
from penstock.kernels.scaled_query import scaled_down

BASIS_TOKENS = 4096
"""Tokens of the longest prompt that a basis is made from; of shorter ones all are."""
ROTATED_UNITS = 64
"""Rebuilt units that are rotated at a time, in float32."""
COPY_TOKENS = 4096
"""Tokens of components that are copied at a time."""
NO_COSINE = 2.0
"""In place of a cosine where there is no outlier; larger than any."""


class ShadowKeyIndex(KeyIndex):
    """Ranks units by the landmark of their chunk and rebuilds their keys from low-rank factors.

    Source: ShadowKV (arXiv 2410.21465), section 4, algorithms 1 and 2. Per KV head: a landmark is
    the mean of a chunk's post-RoPE keys; a softmax over landmarks per query head, then the largest
    over the query heads of the KV head, ranks the chunks; the chunks whose keys have the lowest
    minimal cosine with their landmark are outliers, take no part in the softmax and are always
    selected. Joint-head pre-RoPE keys are factored, A = K V and V^T, by the right singular vectors
    V of the prompt; keys of what was selected are A V^T of one head, rotated.

    Rows are (sequence, KV head), `rows_per_sequence` rows to a sequence, in order. Keys are
    un-rotated at their cache positions. Under left padding these are the model's positions plus a
    constant: one more rotation, the same for all tokens of the sequence, which the subspace takes
    in and which the same cache positions undo. Without a `rotary` post-RoPE keys are factored.

    Differences:
        - The basis comes from every n-th token of the prompt, at most `BASIS_TOKENS` of the
          longest (the original: SVD of all of it), and by way of the Gram matrix. Padding is in it.
        - Later tokens are projected onto the same basis and may become outliers (the original
          keeps them whole): outliers are the lowest of all closed units, by unit.
        - Several units may share a landmark, which is then the mean of those that have closed; a
          unit is compared with it as it is when the unit closes. A crop into a chunk leaves a share
          of what was cropped in its landmark.
        - Units of sinks and padding, which nothing selects, may be outliers and in the softmax.
    """

    looks_first: ClassVar[bool] = True

    def __init__(
        self, shape: KVShape, *, batch: int, max_units: int, group_tokens: int,
        rows_per_sequence: int, rank: int, landmark_units: int, num_outliers: int, scaling: float,
        rotary: Callable[[Tensor], tuple[Tensor, Tensor]] | None, device: torch.device,
    ) -> None:  # fmt: skip
        """Allocate the index.

        Args:
            shape: of a row, which has one KV head.
            batch: rows.
            rank: components per token of a sequence, all its KV heads together; at most
                rows_per_sequence * head_dim are kept.
            landmark_units: units that share a landmark.
            num_outliers: outlier units of a row.
            scaling: factor on logits.
            rotary: cos and sin of positions, float32 [tokens, rotated components] each; the
                components after those are not rotated.
        """
        assert shape.num_kv_heads == 1, "a row is one KV head"
        assert batch % rows_per_sequence == 0, (batch, rows_per_sequence)
        self._group_tokens, self._scaling, self._rotary = group_tokens, scaling, rotary
        self._heads, self._landmark_units = rows_per_sequence, landmark_units
        width, dtype = shape.head_dim, shape.dtype
        sequences, joint = batch // rows_per_sequence, rows_per_sequence * width
        tokens = max_units * group_tokens
        self._rank = min(rank, joint)
        self._stride = -(-tokens // BASIS_TOKENS)
        chunks = -(-max_units // landmark_units)
        self._landmarks = torch.zeros(batch, chunks, width, dtype=dtype, device=device)
        self._components = torch.zeros(sequences, tokens, self._rank, dtype=dtype, device=device)
        self._basis = torch.zeros(sequences, joint, self._rank, dtype=dtype, device=device)
        size = (batch, num_outliers)
        self._outlier_units = torch.full(size, -1, dtype=torch.int64, device=device)
        self._outlier_cosines = torch.full(size, NO_COSINE, dtype=torch.float32, device=device)
        self._outlier_keys = torch.zeros(*size, group_tokens, width, dtype=dtype, device=device)
        self._moment: Tensor | None = None
        self._ready = False

    @staticmethod
    def num_bytes(
        shape: KVShape, *, batch: int, max_units: int, group_tokens: int, rows_per_sequence: int,
        rank: int, landmark_units: int, num_outliers: int,
    ) -> int:  # fmt: skip
        """Bytes of one layer's index, for the ledger; arguments as in the constructor."""
        joint, size = rows_per_sequence * shape.head_dim, shape.dtype.itemsize
        factors = (max_units * group_tokens + joint) * min(rank, joint) * size
        landmarks = -(-max_units // landmark_units) * shape.head_dim * size
        outliers = num_outliers * (group_tokens * shape.head_dim * size + 12)
        return batch // rows_per_sequence * factors + batch * (landmarks + outliers)

    @staticmethod
    def scratch_bytes(
        shape: KVShape, *, batch: int, max_units: int, group_tokens: int, rows_per_sequence: int,
        rank: int, selected_units: int,
    ) -> int:  # fmt: skip
        """Temporaries of the largest call: making the basis, `score`, or `rebuild_keys`."""
        joint = rows_per_sequence * shape.head_dim
        fit = (4 * (batch // rows_per_sequence) + 24) * joint**2
        score = batch * max_units * (12 * shape.num_query_heads + 5)
        per_token = (min(rank, joint) + 2 * shape.head_dim) * shape.dtype.itemsize + 8
        rotated = ROTATED_UNITS * group_tokens * 24 * shape.head_dim
        return max(fit, score, batch * selected_units * group_tokens * per_token + rotated)

    # Basis ------------------------------------------------------------------------------------

    @property
    @override
    def ready(self) -> bool:
        """Whether `fit` has been called."""
        return self._ready

    @override
    def fit(self, sample: Tensor, positions: Tensor) -> None:
        """`look` replaces the sample by the prompt."""
        self._moment = None
        self._add_to_moment(sample, positions.to(sample.device))
        self._ready = True

    refits: ClassVar[bool] = True

    @override
    def forget_fit(self) -> None:
        self._ready = False

    @override
    def look(self, keys: Tensor, first_token: int) -> None:
        if first_token == 0:
            self._moment = None
        start = -first_token % self._stride
        positions = torch.arange(first_token, first_token + keys.shape[1], device=keys.device)
        part = slice(start, None, self._stride)
        self._add_to_moment(keys[:, part], positions[part])

    def _add_to_moment(self, keys: Tensor, positions: Tensor) -> None:
        """Add K^T K of the joint pre-RoPE keys. float32 [sequences, joint_dim, joint_dim]"""
        joint = self._joint(self._unrotated(keys, positions))
        if self._moment is None:
            self._moment = joint.new_zeros(joint.shape[0], joint.shape[2], joint.shape[2])
        self._moment.baddbmm_(joint.transpose(1, 2), joint)

    def _make_basis(self, moment: Tensor) -> None:
        for target, source in zip(self._basis, moment, strict=True):
            target.copy_(fit_basis(source, self._rank))

    def _joint(self, by_row: Tensor) -> Tensor:
        """[rows, tokens, head_dim] to [sequences, tokens, joint_dim]."""
        rows, tokens, width = by_row.shape
        split = by_row.reshape(rows // self._heads, self._heads, tokens, width)
        return split.transpose(1, 2).reshape(rows // self._heads, tokens, self._heads * width)

    def _unrotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Pre-RoPE keys. [rows, tokens, 1, head_dim] to float32 [rows, tokens, head_dim]"""
        flat = keys[:, :, 0].float()
        if self._rotary is None:
            return flat
        cos, sin = self._rotary(positions)
        # Some models scale both; the inverse divides by the square of that.
        square = cos.square() + sin.square()
        return _rotated(flat, cos / square, -sin / square)

    # Keys -------------------------------------------------------------------------------------

    @override
    def append(self, keys: Tensor, first_token: int) -> None:
        if self._moment is not None:
            self._make_basis(self._moment)
            self._moment = None
        end = first_token + keys.shape[1]
        positions = torch.arange(first_token, end, device=keys.device)
        joint = self._joint(self._unrotated(keys, positions))
        self._components[:, first_token:end] = torch.matmul(joint, self._basis.float()).to(
            self._components.dtype
        )
        first_unit = first_token // self._group_tokens
        units = keys.reshape(keys.shape[0], -1, self._group_tokens, keys.shape[-1])
        landmarks = self._add_to_landmarks(units.float().mean(dim=2), first_unit)
        if self._outlier_units.shape[1]:
            cosines = torch.cosine_similarity(units.float(), landmarks[:, :, None], dim=-1)
            self._keep_outliers(units, cosines.amin(dim=2), first_unit)

    def _add_to_landmarks(self, means: Tensor, first_unit: int) -> Tensor:
        """Take units into the means of their chunks.

        Args:
            means: of the units' keys, float32 [rows, units, head_dim].

        Returns:
            The landmark of each unit, alike.
        """
        before = first_unit % self._landmark_units
        chunks = torch.arange(before, before + means.shape[1], device=means.device)
        chunks = chunks // self._landmark_units
        first = first_unit // self._landmark_units
        end = first + (before + means.shape[1] - 1) // self._landmark_units + 1
        counts = torch.bincount(chunks, minlength=end - first)
        sums = means.new_zeros(means.shape[0], end - first, means.shape[2])
        sums.index_add_(1, chunks, means)
        if before:
            sums[:, 0] += self._landmarks[:, first] * before
            counts[0] += before
        sums /= counts[:, None]
        self._landmarks[:, first:end] = sums.to(self._landmarks.dtype)
        return sums[:, chunks]

    def _keep_outliers(self, units: Tensor, cosines: Tensor, first_unit: int) -> None:
        """Keep the units of lowest minimal cosine among the outliers and those that have closed.

        Args:
            units: keys. [rows, units, group_tokens, head_dim]
            cosines: float32 [rows, units]
        """
        count = self._outlier_units.shape[1]
        stale = self._outlier_units >= first_unit
        self._outlier_units.masked_fill_(stale, -1)
        self._outlier_cosines.masked_fill_(stale, NO_COSINE)
        new = torch.arange(first_unit, first_unit + units.shape[1], device=units.device)
        all_units = torch.cat([self._outlier_units, new.expand(units.shape[0], -1)], dim=1)
        all_cosines = torch.cat([self._outlier_cosines, cosines], dim=1)
        lowest, chosen = all_cosines.topk(count, largest=False)
        rows = torch.arange(units.shape[0], device=units.device)[:, None]
        kept = self._outlier_keys[rows, chosen.clamp(max=count - 1)]
        taken = units[rows, (chosen - count).clamp(min=0)]
        is_old = (chosen < count)[:, :, None, None]
        self._outlier_keys.copy_(torch.where(is_old, kept, taken))
        self._outlier_cosines.copy_(lowest)
        self._outlier_units.copy_(all_units.gather(1, chosen))

    @override
    def take_rows_from(self, other: KeyIndex, rows: Tensor) -> None:
        """Rows of a sequence stay together."""
        assert isinstance(other, ShadowKeyIndex)
        sequences = rows[:: self._heads] // self._heads
        self._ready = other._ready
        self._moment = None if other._moment is None else other._moment[sequences]
        self._basis.copy_(other._basis[sequences])
        for start in range(0, self._components.shape[1], COPY_TOKENS):
            part = slice(start, start + COPY_TOKENS)
            self._components[:, part] = other._components[:, part][sequences]
        self._landmarks.copy_(other._landmarks[rows])
        self._outlier_units.copy_(other._outlier_units[rows])
        self._outlier_cosines.copy_(other._outlier_cosines[rows])
        self._outlier_keys.copy_(other._outlier_keys[rows])

    # Scores -----------------------------------------------------------------------------------

    @override
    def score(self, query: Tensor, num_units: int) -> Tensor:
        """Shares of the softmax, and more than all of it for outliers."""
        chunks = -(-num_units // self._landmark_units)
        query, factor = scaled_down(query)
        logits = torch.matmul(query, self._landmarks[:, :chunks].transpose(1, 2)).float()
        logits *= self._scaling * factor
        if self._landmark_units > 1:
            logits = logits.repeat_interleave(self._landmark_units, dim=2)[:, :, :num_units]
        outliers = self._is_outlier(num_units)
        logits.masked_fill_(outliers[:, None], torch.finfo(torch.float32).min)
        best = torch.softmax(logits, dim=2).amax(dim=1)
        return best.masked_fill_(outliers, 2.0)

    def _is_outlier(self, num_units: int) -> Tensor:
        """bool [rows, num_units]"""
        units = self._outlier_units
        inside = torch.where((units >= 0) & (units < num_units), units, num_units)
        mask = torch.zeros(
            units.shape[0], num_units + 1, dtype=torch.bool, device=units.device
        )  # fmt: skip
        return mask.scatter_(1, inside, True)[:, :num_units]

    # Rebuilding -------------------------------------------------------------------------------

    @override
    def rebuild_keys(self, rows: NDArray[np.int64], units: NDArray[np.int64]) -> Tensor:
        """Low-rank keys, rotated; true ones for outliers."""
        device = self._components.device
        row, unit = torch.from_numpy(rows).to(device), torch.from_numpy(units).to(device)
        keys = self._expanded(rows, row, unit)
        if self._rotary is not None:
            for start in range(0, len(rows), ROTATED_UNITS):
                part = slice(start, start + ROTATED_UNITS)
                cos, sin = self._rotary(self._positions(unit[part]).flatten())
                turned = _rotated(keys[part].flatten(0, 1).float(), cos, sin)
                keys[part] = turned.view(-1, *keys.shape[1:]).to(keys.dtype)
        if self._outlier_units.shape[1]:
            found, which = (self._outlier_units[row] == unit[:, None]).max(dim=1)
            keys[found] = self._outlier_keys[row[found], which[found]]
        return keys.unsqueeze(2)

    def _positions(self, units: Tensor) -> Tensor:
        """Cache positions of the units' tokens. int64 [*units.shape, group_tokens]"""
        tokens = torch.arange(self._group_tokens, device=units.device)
        return units[..., None] * self._group_tokens + tokens

    def _expanded(self, rows: NDArray[np.int64], row: Tensor, unit: Tensor) -> Tensor:
        """Pre-RoPE keys of units, each of its own head: one product per row, padded to one size.

        Args:
            rows, row: of the units, in both forms. [landed]
            unit: [landed]

        Returns:
            [landed, group_tokens, head_dim], in the model's dtype
        """
        total, width = self._landmarks.shape[0], self._landmarks.shape[2]
        counts = np.bincount(rows, minlength=total)
        order = np.argsort(rows, kind="stable")
        place = np.empty_like(rows)
        place[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        where = (row, torch.from_numpy(place).to(row.device))
        by_row = unit.new_zeros(total, int(counts.max()))
        by_row[where] = unit
        sequences = torch.arange(total, device=row.device) // self._heads
        components = self._components[sequences[:, None, None], self._positions(by_row)]
        by_head = self._basis.view(total, width, self._rank).transpose(1, 2)
        keys = torch.matmul(components.flatten(1, 2), by_head)
        return keys.view(*components.shape[:3], width)[where]


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading components as Llama does.

    Args:
        states: [..., tokens, head_dim]
        cos, sin: both halves alike. [tokens, rotated components]
    """
    rotated = cos.shape[-1]
    head, rest = states[..., :rotated], states[..., rotated:]
    first, second = head.chunk(2, dim=-1)
    turned = head * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
