"""What an audit prints: a row for each policy, then the captured mass of every layer."""

from collections.abc import Sequence

from penstock.core.byte_size import format_bytes
from penstock.evaluate.audit.run import Fidelity
from penstock.evaluate.text_table import format_table

_ACROSS = 6
"""Policies side by side in the table of layers."""


def audit_table(audits: Sequence[Fidelity], layers: Sequence[int], top: int) -> str:
    """One row for each setting.

    Args:
        layers: the model's number of each layer that is audited.
        top: what recall is about.
    """
    header = [
        "policy", "tokens", "mass", "worst layer", f"recall@{top}", "KL", "worst KL", "same",
        "memory", "share",
    ]  # fmt: skip
    return format_table(header, [_row(audit, layers) for audit in audits])


def _row(audit: Fidelity, layers: Sequence[int]) -> list[str]:
    if audit.refused is not None:
        return [audit.setting, audit.refused]
    worst = min(range(len(layers)), key=lambda number: audit.mass[number])
    assert audit.mean_mass is not None
    assert audit.mean_recall is not None
    assert audit.mean_kl is not None
    assert audit.same_token is not None
    lowest = _share(audit.mass[worst])
    return [
        audit.setting,
        f"{sum(audit.tokens) / len(audit.tokens):,.0f}",
        _share(audit.mean_mass),
        lowest if lowest == "1.000" else f"{lowest} ({layers[worst]})",
        _share(audit.mean_recall),
        format_nats(audit.mean_kl),
        format_nats(max(audit.kl)),
        f"{audit.same_token:.0%}",
        format_bytes(audit.ledger_bytes),
        f"{audit.ledger_bytes / audit.full_cache_bytes:.1%}",
    ]


def layer_table(audits: Sequence[Fidelity], layers: Sequence[int]) -> str:
    """Captured mass: layers down, settings across, several tables when there are many settings."""
    done = [audit for audit in audits if audit.refused is None]
    tables = []
    for first in range(0, len(done), _ACROSS):
        part = done[first : first + _ACROSS]
        rows = [
            [str(layer), *(_share(audit.mass[number]) for audit in part)]
            for number, layer in enumerate(layers)
        ]
        tables.append(format_table(["layer", *(audit.setting for audit in part)], rows))
    return "\n\n".join(tables)


def _share(value: float) -> str:
    """A share of one; no rounding up to it."""
    return f"{value:.3f}" if value > 1 - 1e-6 else f"{min(value, 0.999):.3f}"


def format_nats(value: float) -> str:
    """A divergence, to two digits; 9e-06 where it is nothing but rounding."""
    return f"{value:.2g}" if value >= 1e-4 or value == 0 else f"{value:.0e}"
