"""One setting of an audit: the reference's tokens through a policy's cache, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.device_tier.device_layer import DeviceLayer
from penstock.engine.retrieval_layer import RetrievalLayer
from penstock.evaluate.accuracy_settings import Setting
from penstock.evaluate.audit.fidelity import captured_mass, recall_of_top
from penstock.evaluate.audit.reference import Counter, Reference, forward
from penstock.kernels.divergence import kl_divergence
from penstock.models.cache_adapter import TieredCache
from penstock.models.loader import CausalLM
from penstock.models.model_shape import inspect_model


@dataclass(kw_only=True)
class Fidelity:
    """How close one setting stays to full attention. Means are over the steps and rows that count.

    Lists are by tiered layer, by step or by row; all are empty when the budget was refused.
    """

    setting: str
    per_head: bool = False
    """Whether every KV head selects for itself."""
    mass: list[float] = field(default_factory=list)
    """Attention mass captured, 0 to 1, by layer."""
    recall: list[float] = field(default_factory=list)
    """Recall of the top tokens, 0 to 1, by layer."""
    tokens: list[float] = field(default_factory=list)
    """Tokens attended to by a head, sinks, window and the new one included, by layer."""
    kl: list[float] = field(default_factory=list)
    """KL(full || setting) of the next token in nats, by step."""
    same: list[float] = field(default_factory=list)
    """Share of rows with the same most likely token, by step."""
    row_kl: list[float] = field(default_factory=list)
    """The same as `kl`, by row, over its steps."""
    row_same: list[float] = field(default_factory=list)
    """Share of steps with the same most likely token, by row."""
    mean_mass: float | None = None
    """Over layers."""
    mean_recall: float | None = None
    """Over layers."""
    mean_kl: float | None = None
    """Over all steps and rows."""
    same_token: float | None = None
    """Share of all steps and rows with the same most likely token."""
    counted: int = 0
    """Steps of all rows that count."""
    units_wanted: int = 0
    """By all steps, layers and rows."""
    units_hit: int = 0
    """Of those, the ones that were in memory."""
    hit_rate: float | None = None
    """Of the units that steps wanted, the share in memory; None: none was wanted."""
    read_bytes: float = 0.0
    """Read from the store at a step."""
    ledger_bytes: int = 0
    """Most fast memory that the cache held."""
    full_cache_bytes: int = 0
    notices: list[str] = field(default_factory=list)
    refused: str | None = None
    """Why the budget does not do."""


class _Tally:
    """Adds up what each layer attended to, step after step."""

    def __init__(self, reference: Reference, top: int) -> None:
        self._reference = reference
        self._top = top
        self._step = self._counted = 0
        self._told: dict[int, Tensor] = {}
        self._sums = torch.zeros(3, len(reference.shares[0]), dtype=torch.float64)

    def observe(self, layer: int, attended: Tensor) -> None:
        """See `Observer`; layers that attend to everything need not tell."""
        self._told[layer] = attended.cpu()

    def close_step(self) -> None:
        """Count what was told since the last call."""
        reference, step = self._reference, self._step
        live = reference.live[:, step]
        if reference.shares[step]:
            self._counted += int(live.sum())
        for layer, shares in enumerate(reference.shares[step]):
            batch, _, length = shares.shape
            visible = reference.mask[:, :length].cpu().bool()
            attended = self._told.get(layer, visible).view(batch, -1, length)
            figures = (
                captured_mass(shares, attended),
                recall_of_top(shares, attended, visible, self._top),
                attended.sum(dim=2).double().mean(dim=1),
            )
            self._sums[:, layer] += torch.stack([f.double()[live].sum() for f in figures])
        self._told = {}
        self._step += 1

    def means(self) -> list[list[float]]:
        """Mass, recall and tokens attended to, each by layer."""
        means: list[list[float]] = (self._sums / self._counted).tolist()
        return means


def follow(
    model: CausalLM, setting: Setting, reference: Reference, *, top: int, store: str = "auto",
    adapter: str | Path | None = None, on_step: Counter = lambda _: None,
) -> Fidelity:  # fmt: skip
    """Put the reference's text through one setting and compare.

    Args:
        top: how many tokens of the most attention `Fidelity.recall` is about.
        store, adapter: where the cache lies, and its low-rank basis; see `TieredCache`.
        on_step: called after every decode step.

    Raises:
        BudgetError: the budget is too small.
        StorageError: the store cannot be used.
    """
    prompt = reference.prompt
    total = prompt.padded_tokens
    distances: list[Tensor] = []
    agreements: list[Tensor] = []
    with TieredCache(
        model, setting.policy, memory=setting.memory, store=store, adapter=adapter,
        max_tokens=total + reference.num_steps, batch_size=len(prompt.token_ids),
        cuda_graphs=False,  # a step that is replayed tells no observer
    ) as cache:  # fmt: skip
        reference.fill(model, cache)
        tally = _Tally(reference, top)
        for step, full in enumerate(reference.log_probs):
            for layer in cache.tiers.layers:
                if isinstance(layer, RetrievalLayer | DeviceLayer):
                    layer.observer = tally.observe if reference.shares[step] else None
            ids, mask = reference.tokens[:, step : step + 1], reference.mask[:, : total + step + 1]
            log_probs = forward(model, ids, mask, cache)
            tally.close_step()
            distances.append(kl_divergence(full, log_probs).cpu())
            agreements.append((full.argmax(dim=-1) == log_probs.argmax(dim=-1)).double().cpu())
            on_step(step + 1)
        peak_bytes, per_head = cache.report().peak_bytes, cache.policy.per_head
        notices, decode = list(cache.notices), cache.stats.decode
    full_bytes = inspect_model(model).kv.full_cache_bytes(
        len(prompt.token_ids), total + reference.num_steps
    )
    mass, recall, tokens = tally.means()
    kl, same = torch.stack(distances, dim=1), torch.stack(agreements, dim=1)
    return Fidelity(
        setting=setting.text, per_head=per_head, mass=mass, recall=recall, tokens=tokens,
        kl=_means(kl.T, reference.live.T), same=_means(same.T, reference.live.T),
        row_kl=_means(kl, reference.live), row_same=_means(same, reference.live),
        mean_mass=_mean(mass), mean_recall=_mean(recall), mean_kl=float(kl[reference.live].mean()),
        same_token=float(same[reference.live].mean()), counted=int(reference.live.sum()),
        units_wanted=decode.units_wanted, units_hit=decode.units_hit,
        hit_rate=decode.hit_rate if decode.units_wanted else None,
        read_bytes=decode.read_bytes / reference.num_steps,
        ledger_bytes=peak_bytes, full_cache_bytes=full_bytes, notices=notices,
    )  # fmt: skip


def _mean(figures: Sequence[float]) -> float:
    return sum(figures) / len(figures)


def _means(figures: Tensor, live: Tensor) -> list[float]:
    """The mean over what counts of each of the first dimension; both of one shape."""
    return [float(values[counted].mean()) for values, counted in zip(figures, live, strict=True)]
