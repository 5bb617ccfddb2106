"""How much of the attention a division of KVSwap's budget keeps, as measured on pretrained models.

A budget is divided between an index that finds units and slots that hold them. Three figures tell
what each is worth. They were measured with true queries on Qwen2.5-Coder-0.5B and SmolLM2-135M,
2,048 to 8,192 tokens of a book (research/notes/2026-11-26-dividing-a-budget.md):

* Slots. Of the attention outside sinks and window, slots for a share s of all units hold
  s / (s + 1/20) where an index without error fills them.
* Index. Few columns find the mass of a page of text, but not the one unit that an answer hangs on.
  At 16,384 tokens and a thirteenth of the cache, 8, 16, 32 and 48 columns of 4 bits for 2 KV heads
  lose 36, 6.6, 2.2 and 3.4 points of suite real (research/notes/2026-11-26-columns-and-needles.md).
  So what columns miss counts as lost, however many slots there are.
* Reuse. A layer's own slots hold 0.7 to 0.8 of what a selection of their size asks for next, and a
  buffer of two selections 0.85 to 0.9.

The joint keys of wider models were not measured: their columns follow the paper's rank.
"""

from collections.abc import Sequence

HALF_SHARE = 1 / 20
"""Of all units: slots for so many hold half of the attention."""
LEAST_COLUMNS, MOST_COLUMNS = 8, 64
"""Of 4 bits, for 2 and 3 KV heads of 64: more find hardly more."""
PAPER_SIGMA = 32
"""Width of the joint keys by components, at the paper's tightest budget (section 4.3)."""
_STEPS = (1, 2, 3, 4, 6, 8)
"""Indexes that are tried, by the least one."""
_LOSES_LESS_BY = 1.6
"""The power of the columns by which what they miss falls; the least index finds no needle."""
AS_THEY_ARE = 2
"""Columns that find as much of keys as the model has them, by those of keys turned back to their
offset in a block; half as many again where no basis was calibrated."""


def least_columns(joint_dim: int, *, turned: bool, has_adapter: bool) -> int:
    """The fewest components of 4 bits that an index may have.

    Args:
        joint_dim: width of the keys of all KV heads.
        turned: whether keys are turned back to their offset in a block.
        has_adapter: whether a calibrated basis is at hand.
    """
    least = max(LEAST_COLUMNS, joint_dim // PAPER_SIGMA)
    if not turned:
        least = AS_THEY_ARE * least if has_adapter else AS_THEY_ARE * least * 3 // 2
    return min(joint_dim, least)


def column_choices(joint_dim: int, least: int, most: int) -> Sequence[int]:
    """Sizes of an index to choose from, the largest first; none above `most`."""
    most = min(most, max(MOST_COLUMNS, 2 * joint_dim // PAPER_SIGMA, least))
    return sorted({min(most, least * step) for step in _STEPS}, reverse=True)


def kept_share(columns: float, least: int, slots: int, max_units: int) -> float:
    """The estimated share of the attention outside sinks and window that slots hold, 0 to 1.

    Args:
        columns: of the index, in such of 4 bits.
        least: what `least_columns` says.
        slots: of a layer, for one sequence.
        max_units: units of the sequence.
    """
    found: float = max(0.0, 1 - (least / columns) ** _LOSES_LESS_BY)
    held = min(1.0, slots / max_units)
    return found * held / (held + HALF_SHARE)
