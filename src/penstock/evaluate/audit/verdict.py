"""What an audit of several budgets comes to: one table, and the smallest budget that will do."""

from collections.abc import Sequence

from penstock.core.byte_size import format_bytes
from penstock.evaluate.audit.run import Fidelity
from penstock.evaluate.audit.table import format_nats
from penstock.evaluate.text_table import format_table

POLICY = "kvswap"
BUDGETS = "1/4,1/8,1/13,1/20,1/34"
TOLERANCE = 0.03
"""Mean KL of a token in nats."""
LEGEND = """\
memory: most that the cache held. attention: share of full attention's probability on what was
attended to, the mean and the worst layer's. KL: of the next token, in nats, the mean and the
worst step's. other: steps with another likeliest token. hits: of the units wanted, in memory."""


def budget_of(audit: Fidelity) -> str:
    """The budget in a setting: 1/13 of kvswap@1/13."""
    return audit.setting.partition("@")[2] or audit.setting


def budget_table(audits: Sequence[Fidelity], layers: Sequence[int], tolerance: float) -> str:
    """A row for each budget; those within the tolerance have a mark.

    Args:
        layers: the model's number of each layer that is audited.
        tolerance: most mean KL of a token, in nats.
    """
    header = ["budget", "memory", "attention", "worst layer", "KL", "worst", "other", "hits"]
    return format_table(header, [_row(audit, layers, tolerance) for audit in audits])


def _row(audit: Fidelity, layers: Sequence[int], tolerance: float) -> list[str]:
    name = budget_of(audit)
    if audit.refused is not None:
        return [name, "too little: " + audit.refused.rpartition("; ")[2]]
    assert audit.mean_mass is not None
    assert audit.mean_kl is not None
    worst = min(range(len(layers)), key=audit.mass.__getitem__)
    return [
        name + (" *" if audit.mean_kl <= tolerance else ""),
        format_bytes(audit.ledger_bytes),
        _percent(audit.mean_mass),
        f"{_percent(audit.mass[worst])} ({layers[worst]})",
        format_nats(audit.mean_kl),
        format_nats(max(audit.kl)),
        f"{_others(audit)} of {audit.counted}",
        "-" if audit.hit_rate is None else f"{audit.hit_rate:.0%}",
    ]


def best_of(audits: Sequence[Fidelity], tolerance: float) -> Fidelity | None:
    """The smallest budget that is within the tolerance, as every larger one is that was tried."""
    best = None
    for audit in _by_memory(audits):
        if audit.mean_kl is None or audit.mean_kl > tolerance:
            break
        best = audit
    return best


def verdict(audits: Sequence[Fidelity], tolerance: float) -> str:
    """What to take, in a few sentences."""
    tried = _by_memory(audits)
    if not tried:
        return "Every budget is too little for this text; give more, or a longer text"
    best = best_of(audits, tolerance)
    if best is None:
        within = [each for each in tried if (each.mean_kl or 0) <= tolerance]
        if within:
            return (
                f"{budget_of(within[0])} is within {tolerance:g} and the larger "
                f"{budget_of(tried[0])} is not: these steps are too few to tell. Give more "
                "--max-new-tokens, or another text."
            )
        return (
            f"No budget that was tried keeps the KL within {tolerance:g}. At {_kept(tried[0])}. "
            "Try a larger one with --budgets, or exact answers with --exact."
        )
    said = [
        f"At {_kept(best)}.",
        f"The KL of {format_nats(best.mean_kl or 0)} is within {tolerance:g}.",
    ]
    smaller = tried[tried.index(best) + 1 :]
    if smaller:
        said.append(
            f"{budget_of(smaller[0])} is too little: {format_nats(smaller[0].mean_kl or 0)}."
        )
    same = [each for each in tried if not _others(each)]
    if _others(best) and same:
        said.append(f"Use {budget_of(same[-1])} for no other token.")
    elif _others(best):
        said.append("No budget that was tried has all tokens the same.")
    return " ".join(said)


def _by_memory(audits: Sequence[Fidelity]) -> list[Fidelity]:
    """Those that were not refused, the largest budget first."""
    done = [audit for audit in audits if audit.refused is None]
    return sorted(done, key=lambda audit: audit.ledger_bytes, reverse=True)


def _kept(audit: Fidelity) -> str:
    """What a budget keeps, and how much it changes."""
    others = _others(audit)
    differ = f"{others} of {audit.counted} tokens {'differs' if others == 1 else 'differ'}"
    return (
        f"{budget_of(audit)} this model keeps {_percent(audit.mean_mass or 0)} of the attention on "
        f"your text, and {differ}"
    )


def _others(audit: Fidelity) -> int:
    """Steps whose likeliest token is another."""
    return round((1 - (audit.same_token or 0)) * audit.counted)


def _percent(share: float) -> str:
    """Never rounded up to all of it."""
    return f"{share:.0%}" if share < 0.99 or share > 1 - 1e-6 else f"{min(share, 0.999):.1%}"
