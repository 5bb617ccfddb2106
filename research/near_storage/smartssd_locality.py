"""read_locality(): what recorded decodes say of hot pools, for the simulated SmartSSD PC."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from research.near_storage.smartssd_places import Locality

HITS, NAIVE = "both", "naive"
"""Rules of the placement bench: pinning and hit-rate table; whatever scores best now."""
ASSUMED_LOCALITY = Locality(
    (0.2, 0.4, 0.6), (0.6, 0.75, 0.85), (0.5, 0.65, 0.8), (0.05, 0.07, 0.06), "assumed"
)
"""Where no recording is given."""

Row = dict[str, Any]


def read_locality(path: str, alpha: float) -> Locality:
    """The pools of a result of the placement bench, at one alpha, once they have settled.

    Where several documents were played, their mean.

    Raises:
        ConfigError: the file is not such a result, or has nothing at that alpha.
    """
    rows = [row for row in _rows(Result.load(path).figures) if abs(row["alpha"] - alpha) < 1e-9]
    pools = {
        rule: {
            hot: [row for row in rows if (row["rule"], row["hot_share"]) == (rule, hot)]
            for hot in sorted({row["hot_share"] for row in rows if row["rule"] == rule})
        }
        for rule in (HITS, NAIVE)
    }  # fmt: skip
    hot = [share for share in pools[HITS] if share in pools[NAIVE] and 0 < share < 1]
    if not hot:
        raise ConfigError(
            f"{path} has no pools at alpha {alpha:g} under the rules {HITS!r} and {NAIVE!r}; "
            "run the placement bench with that alpha, or give another --alpha"
        )
    shares = {
        rule: [fmean(row["hot_share_of_selected_later"] for row in found[share]) for share in hot]
        for rule, found in pools.items()
    }
    moved = [
        fmean(row["promoted_later"]["mean"] * row["alpha"] / row["selected"]
              for row in pools[NAIVE][share]) for share in hot
    ]  # fmt: skip
    return Locality(hot, shares[HITS], shares[NAIVE], moved, f"recorded, {Path(path).stem}")


def _rows(found: Any) -> Iterator[Row]:
    """Rows of pools, wherever they stand in the figures."""
    if isinstance(found, dict):
        if {"rule", "hot_share", "alpha", "selected", "hot_share_of_selected_later"} <= set(found):
            yield found
        else:
            for value in found.values():
                yield from _rows(value)
    elif isinstance(found, list):
        for value in found:
            yield from _rows(value)
