"""ScoredUnits: any index that scores units of equal size, as a device index (top-k)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.engine.device_tier.device_index import DeviceIndex, StepClock, Wanted
from penstock.engine.key_index import KeyIndex
from penstock.kernels.device.rank_units import rank_units


class ScoredUnits(DeviceIndex):
    """Every step scores all units and selects the best, as `SelectionPolicy.select` does.

    The shapes are those of the longest sequence: units that are not there yet score nothing.
    """

    def __init__(
        self, index: KeyIndex, *, rows: int, max_units: int, wanted: int, device: torch.device,
        resident_factor: float = 1.0,
    ) -> None:  # fmt: skip
        """Wrap `index`, whose `put` takes a unit's number from the device.

        Args:
            resident_factor: see `SelectionPolicy.resident_factor`.
        """
        self.index = index
        self._max_units = max_units
        self._resident_factor = resident_factor
        self._slot_of: Tensor | None = None
        self._wanted = Wanted(
            torch.zeros(rows, wanted, dtype=torch.int32, device=device),
            torch.zeros(rows, wanted, dtype=torch.bool, device=device),
            torch.ones(rows, dtype=torch.bool, device=device),
        )

    @staticmethod
    def num_bytes(*, rows: int, wanted: int) -> int:
        """Bytes of what stands beside the wrapped index, for the ledger."""
        return rows * (5 * wanted + 1)

    @property
    @override
    def ready(self) -> bool:
        return self.index.ready

    @property
    @override
    def wanted_queries(self) -> int:
        return self.index.wanted_queries

    @override
    def see_queries(self, queries: Tensor) -> None:
        self.index.see_queries(queries)

    @override
    def fit(self, sample: Tensor, positions: Tensor) -> None:
        self.index.fit(sample, positions)

    @property
    @override
    def refits(self) -> bool:
        return self.index.refits

    @override
    def forget_fit(self) -> None:
        self.index.forget_fit()

    @override
    def see_start(self, first_unit: NDArray[np.int64]) -> None:
        self.index.see_start(first_unit)

    @override
    def see_slots(self, slot_of: Tensor) -> None:
        self._slot_of = slot_of if self._resident_factor != 1 else None

    @override
    def take(self, keys: Tensor, first_token: int) -> None:
        self.index.append(keys, first_token)

    @override
    def select(self, query: Tensor, clock: StepClock) -> Wanted:
        scores = self.index.score_before(query, self._max_units, clock.end_unit, clock.start_unit)
        ranked = rank_units(
            scores, clock.first_unit, clock.end_unit, self._slot_of, self._resident_factor
        )
        best = ranked.topk(self._wanted.ids.shape[1], dim=1, sorted=False)
        last = self._max_units
        # In ascending order, as the host's fetch plan has them; those that are none come last.
        found = torch.where(best.values > -torch.inf, best.indices, last).sort(dim=1).values
        self._wanted.valid.copy_(found < last)
        self._wanted.ids.copy_(found.clamp_max(last - 1))
        return self._wanted

    @override
    def put(self, keys: Tensor, clock: StepClock) -> None:
        self.index.put(keys, clock.unit)

    @override
    def crop(self, length: int) -> None:
        """Units that are gone are not looked at, and written again."""

    @override
    def take_rows_from(self, other: DeviceIndex, rows: Tensor) -> None:
        assert isinstance(other, ScoredUnits)
        self.index.take_rows_from(other.index, rows)
