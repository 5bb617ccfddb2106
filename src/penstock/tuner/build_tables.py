"""Measure the lookup tables of a model: one setting of KVSwap after the other, on given text.

Source: KVSwap (arXiv 2511.11907), appendix A.1.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from penstock.core.errors import PromptError
from penstock.engine.adapter import LowRankAdapter
from penstock.methods.kvswap.policy import KVSwap
from penstock.models.bundled_adapter import find_adapter
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.tuner.fidelity import Reference
from penstock.tuner.lookup_tables import CAPACITIES, LookupTables, TableEntry
from penstock.tuner.reuse_replay import reuse_rates

GROUPS = (4, 1, 2, 8, 16)
SELECTIONS = (400, 100, 200, 800)
RANKS = (48, 16, 24, 32, 64, 96)
BITS: tuple[Literal[8, 4], ...] = (8, 4)
"""Of each, the default first."""
_DIGITS = 6


def build_tables(
    loaded: LoadedModel, token_ids: Sequence[Tensor], *, forced: int, texts: str,
    adapter: LowRankAdapter | None = None, chunk: int = 1024,
    progress: Callable[[int, int, str], None] | None = None,
) -> LookupTables:  # fmt: skip
    """Read the texts with full attention once, and decode their ends under every setting.

    Args:
        loaded: the model.
        token_ids: the texts, each int64 [tokens]
        forced: tokens at the end of each text that are decoded.
        texts: what they are, for the file.
        adapter: the one that will be used; None: a shipped one, else one made from each text.
        chunk: tokens per forward pass of full attention.
        progress: called with pieces done, pieces in all and what comes next; full attention is one
            piece, and so is every setting.

    Raises:
        PromptError: a text is too short, for what is decoded or for the smallest selection.
        PenstockError: the model does not work in tiers.
    """
    model = loaded.model
    own = fingerprint(model)
    basis = find_adapter(own) if adapter is None else adapter
    widest = inspect_model(model).kv.joint_dim if basis is None else basis.rank
    shortest = min((len(ids) for ids in token_ids), default=0) - forced
    settings = _settings(widest, shortest)
    total = 1 + len(settings)
    tell = (lambda *_: None) if progress is None else progress
    tell(0, total, "full attention")
    reference = Reference(model, token_ids, forced=forced, chunk=chunk)
    entries = []
    for done, policy in enumerate(settings, start=1):
        tell(done, total, _named(policy))
        entries.append(_measure(reference, policy, basis))
    tell(total, total, "done")
    return LookupTables(
        model=loaded.name, fingerprint=own, texts=texts,
        tokens=max(len(ids) for ids in token_ids), entries=tuple(entries),
    )  # fmt: skip


def _settings(widest: int, shortest: int) -> list[KVSwap]:
    """The default first; then other groups and selections, then other indexes.

    Args:
        widest: most components that the index can have.
        shortest: tokens in front of what is decoded, at least.
    """
    selections = [tokens for tokens in SELECTIONS if tokens <= shortest // 2]
    if not selections:
        raise PromptError(
            f"the shortest text has {max(0, shortest):,} tokens before what is decoded; to measure "
            f"selections of {min(SELECTIONS)} it needs at least {2 * min(SELECTIONS)}"
        )
    ranks = [rank for rank in RANKS if rank <= widest] or [widest]
    chosen = [(group, tokens, ranks[0], BITS[0]) for group in GROUPS for tokens in selections]
    chosen += [
        (GROUPS[0], selections[0], rank, bits)
        for rank in ranks
        for bits in BITS
        if (rank, bits) != (ranks[0], BITS[0])
    ]
    # Slots for one selection: what is attended to is then what was selected.
    return [
        KVSwap(
            group_tokens=group, selected_tokens=tokens, reuse_tokens=tokens, rank=rank,
            index_bits=bits,
        )
        for group, tokens, rank, bits in chosen
    ]  # fmt: skip


def _measure(reference: Reference, policy: KVSwap, adapter: LowRankAdapter | None) -> TableEntry:
    """One setting."""
    assert policy.selected_tokens is not None
    assert policy.rank is not None
    assert policy.index_bits is not None
    found = reference.measure(policy, memory=None, adapter=adapter, record=True)
    capacities = [round(share * policy.selected_tokens) for share in CAPACITIES]
    rates = reuse_rates(found.selections, capacities)
    return TableEntry(
        group_tokens=policy.group_tokens, selected_tokens=policy.selected_tokens,
        rank=policy.rank, index_bits=policy.index_bits, kl=round(found.kl, _DIGITS),
        kl_p90=round(found.kl_p90, _DIGITS), agreement=round(found.agreement, _DIGITS),
        reuse=tuple(round(rates[capacity], _DIGITS) for capacity in capacities),
    )  # fmt: skip


def _named(policy: KVSwap) -> str:
    """A callback for progress."""
    return (
        f"G={policy.group_tokens} MG={policy.selected_tokens} rank={policy.rank} "
        f"bits={policy.index_bits}"
    )
