"""Fidelity of the suite real: held-out text decoded under a setting, beside full attention."""

import time
from collections.abc import Callable, Sequence

import torch

from penstock.core.errors import BudgetError
from penstock.evaluate.accuracy_cells import Cell
from penstock.evaluate.accuracy_settings import Setting
from penstock.evaluate.audit.reference import Reference, make_reference
from penstock.evaluate.audit.run import follow
from penstock.evaluate.tasks.real.passages import STEPS
from penstock.generation.prompts import make_batch
from penstock.models.loader import LoadedModel

_ROWS_ON_CPU, _ROWS_ON_CUDA = 4, 24
_LOOK_EVERY = 8
"""Attention is looked at in every eighth step; distributions are compared in all."""
_TOP = 64


def rows_at_a_time(device: str) -> int:
    """Passages that are decoded as a batch, at most.

    Of each, full attention's distribution of all steps is kept, 4 bytes for a word of the
    vocabulary and step: 3.7 GB of a GPU's memory for 24 passages and a vocabulary of 152K.
    """
    return _ROWS_ON_CPU if device == "cpu" else _ROWS_ON_CUDA


def read_passages(
    loaded: LoadedModel, rows: Sequence[Sequence[int]], *, chunk: int,
    on_tokens: Callable[[int], None],
) -> Reference:  # fmt: skip
    """Full attention's reading of passages, of which the last `STEPS` tokens are decoded.

    Args:
        rows: token ids of the passages, equally many.
        chunk: tokens per forward pass.
        on_tokens: called with the tokens read so far.

    Raises:
        PromptError: they do not fit the model.
    """
    prompts = [list(row[:-STEPS]) for row in rows]
    return make_reference(
        loaded, make_batch(loaded, prompts, new_tokens=STEPS, pad_token_id=0), new_tokens=STEPS,
        chunk=chunk, ends=frozenset(), following=torch.tensor([row[-STEPS:] for row in rows]),
        look_every=_LOOK_EVERY, on_prefill=on_tokens,
    )  # fmt: skip


def follow_passages(
    loaded: LoadedModel, reference: Reference, setting: Setting, cell: Cell, *, store: str
) -> None:
    """Decode the passages under a setting, and count what came out."""
    began = time.perf_counter()
    try:
        done = follow(loaded.model, setting, reference, top=_TOP, store=store)
    except BudgetError as error:
        cell.refused = str(error)
        return
    cell.seconds = time.perf_counter() - began
    cell.scores, cell.kl, cell.mass = done.row_same, done.row_kl, done.mass
    cell.tokens = reference.num_steps * len(done.row_kl)
    cell.sparse_tokens = cell.tokens if min(done.mass) < 1 - 1e-6 else 0
    cell.units_wanted, cell.units_hit = done.units_wanted, done.units_hit
    cell.read_bytes = round(done.read_bytes * reference.num_steps)
    cell.ledger_bytes, cell.full_cache_bytes = done.ledger_bytes, done.full_cache_bytes
