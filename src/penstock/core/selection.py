"""Selection: the units that one layer wants for one decode step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Selection:
    """Units chosen by a policy, per batch row, spanning all KV heads.

    Per-head units (clusters, segments) will add a `kv_heads` axis of their own; a unit spans all.
    """

    unit_ids: NDArray[np.int64]
    """Chosen units, ascending in each row, without repeats among the valid ones. [batch, wanted]"""
    valid: NDArray[np.bool_] | None = None
    """False where a row has fewer units to choose from than others; None when all are valid."""
    reused: NDArray[np.bool_] | None = None
    """Rows whose units are those of the step before, kept without ranking; None: no row. [batch]"""
