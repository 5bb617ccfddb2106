"""stored_fault(): what is wrong with an index that came out of a file."""

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.engine.adapter import basis_fault, scale_fault

PLAIN = {"codes", "basis", "step"}
TURNED = {"block_tokens", "scale", "fine"}
"""What there is beside `PLAIN` where keys are turned; the last two are younger than the first."""

VALUE_SUM = "value_sum"
"""What a `TailLayer` stores beside its index; others leave it."""


def stored_fault(
    state: Mapping[str, Tensor], block_tokens: int | None, most_fine: int
) -> str | None:
    """What is wrong with the numbers of a stored index, in words; None where nothing is.

    Args:
        state: see `LowRankIndex.state`; its codes and basis have the shapes that are wanted.
        block_tokens: of the blocks that keys would be turned by; None where they cannot be.
        most_fine: second columns that codes of these bits may have.
    """
    basis, step, codes = state["basis"].float(), state["step"], state["codes"]
    fault = basis_fault(basis, step) or _codes_fault(codes)
    if fault is None and not bool(step.reciprocal().isfinite().all()):
        fault = "a step is too small"
    if fault is not None or "block_tokens" not in state:
        return fault
    return (
        scale_fault(state.get("scale"), len(basis))
        or _block_fault(state["block_tokens"], block_tokens)
        or _fine_fault(state.get("fine"), most_fine)
    )


def _codes_fault(codes: Tensor) -> str | None:
    """Integers mean something whatever they are."""
    if codes.is_floating_point() and not bool(codes.isfinite().all()):
        return "its components are not finite"
    return None


def _block_fault(stored: Tensor, block_tokens: int | None) -> str | None:
    if block_tokens is None:
        return "its keys are turned by blocks, which is not known of this model's"
    if not torch.equal(stored, torch.tensor([block_tokens])):
        return f"its keys are not turned by blocks of {block_tokens} tokens"
    return None


def _fine_fault(stored: Tensor | None, most: int) -> str | None:
    if stored is None:
        return None
    whole = stored.numel() == 1 and stored.dtype == torch.int64
    return None if whole and 0 <= int(stored) <= most else "it has no such second columns"
