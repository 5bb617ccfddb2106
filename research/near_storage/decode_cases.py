"""Rows of `near_storage.decode`: methods under one memory budget, and hot pools of many sizes."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import ConfigError
from penstock.evaluate.accuracy_settings import parse_setting
from penstock.methods import SelectionPolicy
from penstock.methods.hillinfer.policy import HillInfer
from research.clusters.end_to_end_run import MAIN, Case

SPLIT = "split"
"""Section beside MAIN: HillInfer with hot pools of several sizes, and with the solved one."""
OURS, PLAIN = "hillinfer", "hillinfer:near=false"
UNLIMITED = ("full", "flexgen")
"""Methods that take no budget: everything in memory, or nothing."""
_PLACE = (MAIN, SPLIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class NearCase(Case):
    """One row: a method on a device at a length, with a hot pool of a size or a budget.

    `reuse` of `Case` is, in the section "split", the most tokens that may be hot, in selections;
    in "main" it says nothing: slots are what the budget holds, or `hot`.
    """

    hot: int = 0
    """Tokens of the hot pool; 0: HillInfer solves for it, and other methods have what fits."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells rows apart."""
        return (*self.group, self.method, self.reuse, self.hot)

    @property
    def title(self) -> str:
        """The case in words."""
        whole = super(NearCase, self).title  # slots=True makes another class of this one
        return f"{whole}, {self.hot:,} hot" if self.hot else whole

    @property
    def policy(self) -> SelectionPolicy:
        """The policy, with as many selected tokens as all others."""
        policy: Any = parse_setting(self.method).policy
        if "selected_tokens" not in {field.name for field in dataclasses.fields(policy)}:
            return policy  # type: ignore[no-any-return]
        policy = replace(policy, selected_tokens=self.selected)
        if isinstance(policy, HillInfer):
            solved = self.section == SPLIT and not self.hot
            most = round(self.reuse * self.selected) if solved else None
            return replace(policy, hot_tokens=self.hot or None, reuse_tokens=most)
        if not policy.drops:
            policy = replace(policy, reuse_tokens=self.length)
        same: SelectionPolicy = policy
        return same


def with_budget(method: str, memory: str) -> str:
    """A setting with the budget in it, unless it names one or its method takes none."""
    head, colon, options = method.partition(":")
    if "@" in head or head in UNLIMITED:
        return method
    return f"{head}@{memory}{colon}{options}"


def without_budget(method: str) -> str:
    """A setting as it is spoken of."""
    head, colon, options = method.partition(":")
    return f"{head.partition('@')[0]}{colon}{options}"


def main_cases(
    methods: Sequence[str], *, device: str, length: int, alpha: float, memory: str,
    hot_share: float,
) -> list[NearCase]:  # fmt: skip
    """All methods under the same budget; then HillInfer with and without a device with the same
    hot pool, whatever memory that takes.

    Args:
        memory: budget of what the main process holds, as `TieredCache` takes it.
        hot_share: of that hot pool, in what the length is; 0: not measured.
    """
    place: dict[str, Any] = {"section": MAIN, "device": device, "length": length, "ratio": alpha}
    out = [NearCase(**place, method=with_budget(method, memory)) for method in methods]
    if hot_share:
        hot = max(round(hot_share * length), out[0].selected)
        out += [NearCase(**place, method=method, hot=hot) for method in (OURS, PLAIN)]
    return out


def split_cases(
    *, device: str, length: int, alpha: float, sizes: int, most: float
) -> list[NearCase]:
    """HillInfer with the split solved; then `sizes` hot pools, from one selection to the most.

    Args:
        most: largest hot pool, in what the length is.

    Raises:
        ConfigError: the largest pool does not hold one selection.
    """
    if most < alpha:
        raise ConfigError(f"a hot pool of {most:g} does not hold a selection of {alpha:g}")
    place: dict[str, Any] = {
        "section": SPLIT, "device": device, "length": length, "ratio": alpha, "method": OURS,
        "reuse": most / alpha,
    }  # fmt: skip
    shares = [alpha + (most - alpha) * i / (sizes - 1) for i in range(sizes)]
    return [NearCase(**place), *(NearCase(**place, hot=round(share * length)) for share in shares)]


def section_order(row: dict[str, Any]) -> tuple[Any, ...]:
    """Rows in the order in which they are printed."""
    return _PLACE.index(row["section"]), row["length"], -row["ratio"], row["device"]
