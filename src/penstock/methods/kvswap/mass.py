"""MassMeter: how much of the attention a selection has, by the index and by a few units read."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.selection import Selection

LOG_GAP = 0.35
"""A unit's logits add up to so much more than the largest, in logarithms, by the logarithm of its
tokens: units of four have 0.48, the mean over layers and heads of two pretrained models."""
PROBES = 4
"""Unread units that are drawn in a step of a layer."""
LEAST_KNOWN = 1e-3
"""Share of what is attended to that is counted as known at least, whatever the probes have."""
LEAST_UNITS = 2 * PROBES
"""Slots that a layer needs."""
EVEN_SHARE, HEAD_SHARE = 0.3, 0.3
"""Of the probability of a probe: what all units have alike, and what all heads have alike."""
DECAY = 0.9
"""Of what probes of a step before say."""


@dataclass(slots=True)
class Chosen:
    """Units of one step, and what the index says of all units. Masses are relative to the index's
    own sum over all that there is, by head."""

    best: Tensor
    """bool [rows, units]"""
    capped: Tensor
    """Whether a row wanted more units than there is room for. bool [rows]"""
    masses: Tensor
    """float32 [rows, units, heads]"""
    kept: Tensor
    """Of sinks and window. float32 [rows, heads]"""
    probes: Tensor
    """Units drawn, with repeats. int64 [rows, draws]"""
    chances: Tensor
    """Of each draw to be that unit. [rows, draws]"""
    absent: Tensor
    """Units that could be drawn: those in no slot, once the best ones were. bool [rows, units]"""
    left: Tensor
    """Units of former steps that are attended to as well; neither best nor probes. bool
    [rows, units]"""


@dataclass(frozen=True, slots=True)
class MassEstimate:
    """Of one layer and step."""

    captured: Tensor
    """Share of the attention that is attended to, the mean over heads, 0 to 1. float32 [rows]"""
    variance: Tensor
    """Of `captured`. float32 [rows]"""
    unread: Tensor
    """What is not attended to, by what is. float32 [rows, heads]"""


class MassMeter:
    """Chooses units until the index says that they have enough of the attention, and learns from
    a few unread ones how far the index is off.

    The index knows a unit's largest logit, roughly; `LOG_GAP` makes its mass of it. A selection is
    better in the index's eyes than in truth: it was chosen for being so. So a few of the units that
    are not chosen are read all the same, drawn with chances that follow their masses: the mean of
    mass by chance estimates the sum without bias (Hansen and Hurwitz, On the theory of sampling
    from finite populations, 1943). Their sum over the last steps by the index's, head by head, is
    the factor on what the index says of unread units. The variance is that of one step's draws,
    and of their mean: steps before make the estimate better, but nothing says how much a step
    differs from them.
    """

    def __init__(
        self, rows: int, heads: int, *, mass: float, unit_tokens: int, seed: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Know nothing yet.

        Args:
            mass: share of the attention that is wanted, the mean over heads.
        """
        self.mass, self._gap = mass, LOG_GAP * math.log(unit_tokens)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._found = torch.zeros(rows, heads, device=device)
        self._said = torch.zeros(rows, heads, device=device)
        self._spread = torch.zeros(rows, device=device)
        self._steps = torch.zeros((), device=device)

    @staticmethod
    def scratch_bytes(rows: int, max_units: int, heads: int) -> int:
        """Temporaries of a step, for the ledger: masses of two layers, and what makes them."""
        return 4 * rows * max_units * (4 * heads + 8)

    def choose(
        self, logits: Tensor, kept: Tensor, first_unit: NDArray[np.int64], most: int
    ) -> Chosen:
        """Best units until `mass` is there; `draw` adds the probes.

        Args:
            logits: each unit's largest, by the index. float32 [rows, units, heads]
            kept: log-sum-exp of the logits of sinks and window. float32 [rows, heads]
            first_unit: units before it may not be chosen, per row. [rows]
            most: units that there is room for, probes counted; more than there are probes. All
                are taken where there is room for them.
        """
        rows, units, _ = logits.shape
        device = logits.device
        logits = logits + self._gap
        there = torch.ones(rows, units, dtype=torch.bool, device=device)
        if first_unit.any():
            starts = torch.from_numpy(first_unit).to(device)[:, None]
            there = torch.arange(units, device=device) >= starts
            logits = logits.masked_fill(~there[:, :, None], float("-inf"))
        total = torch.logaddexp(logits.logsumexp(dim=1), kept)
        masses = (logits - total[:, None]).exp()
        share = masses.mean(dim=2)
        room = units if most >= units else most - PROBES
        best, order = share.topk(room, dim=1)
        reached = (kept - total).exp().mean(dim=1, keepdim=True) + best.cumsum(dim=1)
        wanted = (reached < self.mass).sum(dim=1) + 1
        if room == units:  # slots hold all of them, so that none is read twice
            wanted = torch.full_like(wanted, units)
        counts = torch.minimum(wanted.clamp(max=room), there.sum(dim=1))
        chosen = torch.zeros_like(there)
        taken = torch.arange(room, device=device) < counts[:, None]
        chosen.scatter_(1, order, taken)
        nothing = torch.zeros_like(chosen)
        return Chosen(
            best=chosen, capped=(wanted > room) & (room < units), masses=masses,
            kept=(kept - total).exp(), probes=order[:, :0], chances=best[:, :0],
            absent=there & ~chosen, left=nothing,
        )  # fmt: skip

    def draw(self, chosen: Chosen, resident: Tensor) -> None:
        """Draw probes among the units that are in no slot; a row without any draws what it has
        chosen, which tells nothing.

        Args:
            resident: units in slots, the best ones too. bool [rows, units]
        """
        chosen.absent = absent = chosen.absent & ~resident
        has = absent.any(dim=1, keepdim=True)
        if not bool(has.any()):
            return
        by = torch.where(has, absent, chosen.best | ~chosen.best.any(dim=1, keepdim=True))
        by_head = chosen.masses * by[:, :, None]
        by_head = (by_head / by_head.sum(dim=1, keepdim=True).clamp_min(1e-30)).mean(dim=2)
        by_mass = chosen.masses.mean(dim=2) * by
        by_mass = by_mass / by_mass.sum(dim=1, keepdim=True).clamp_min(1e-30)
        even = by / by.sum(dim=1, keepdim=True)
        chance = (1 - EVEN_SHARE - HEAD_SHARE) * by_mass + HEAD_SHARE * by_head + EVEN_SHARE * even
        chance = chance / chance.sum(dim=1, keepdim=True)
        chosen.probes = torch.multinomial(
            chance, PROBES, replacement=True, generator=self._generator
        )
        chosen.chances = chance.gather(1, chosen.probes)

    def measure(self, chosen: Chosen, attended: Tensor, probed: Tensor) -> MassEstimate:
        """What a step has, once its units are there.

        Args:
            attended: log-sum-exp of the true logits of all that the step attends to, probes too.
                float32 [rows, heads]
            probed: of each probe's tokens. float32 [rows, draws, heads]
        """
        draws = chosen.probes.shape[1]
        if not draws:
            whole = torch.ones(len(attended), device=attended.device)
            return MassEstimate(whole, torch.zeros_like(whole), torch.zeros_like(attended))
        # All is relative to what is known to be attended to, in truth and by the index: a query
        # that was predicted a little too long makes all of it heavier.
        outside = chosen.absent.gather(1, chosen.probes)[:, :, None]
        share = (probed - attended[:, None]).exp() * outside
        read = (share * ~_repeats(chosen.probes)[:, :, None]).sum(dim=1)
        known = (1 - read).clamp_min(LEAST_KNOWN)
        found, read = share / chosen.chances[:, :, None] / known[:, None], read / known
        known_to_index = chosen.kept + _sum_of(chosen.masses, chosen.best | chosen.left)
        said = _sum_of(chosen.masses, chosen.absent) / known_to_index
        unknown = _sum_of(chosen.masses, ~(chosen.best | chosen.left)) / known_to_index
        self._steps.mul_(DECAY).add_(1.0)
        self._found.mul_(DECAY).add_(found.mean(dim=1))
        self._said.mul_(DECAY).add_(said)
        factor = self._found / self._said.clamp_min(1e-30)
        unread = torch.maximum(factor * unknown, read)
        captured = ((1 + read) / (1 + unread)).mean(dim=1)
        slope = (1 + read) / (1 + unread).square()
        deviation = ((found - (factor * said)[:, None]) * slope[:, None]).mean(dim=2)
        spread = deviation.square().sum(dim=1) / max(1, draws - 1) / draws
        self._spread.mul_(DECAY).add_(spread)
        rest = (unread - read) / (1 + read)
        variance = self._spread / self._steps * (1 + 1 / self._steps)
        return MassEstimate(captured, variance, rest)

    def take_rows_from(self, other: "MassMeter", rows: Tensor) -> None:
        """Become a copy with row i taken from row `rows[i]`."""
        self._found, self._said = other._found[rows].clone(), other._said[rows].clone()
        self._spread, self._steps = other._spread[rows].clone(), other._steps.clone()

    def reset(self) -> None:
        """Another text comes."""
        for each in (self._found, self._said, self._spread, self._steps):
            each.zero_()


def selection_of(units: NDArray[np.bool_]) -> Selection:
    """Units of each row, ascending, short rows filled up. units: [rows, units]"""
    counts = units.sum(axis=1)
    most = int(counts.max())
    chosen = np.argsort(~units, axis=1, kind="stable")[:, :most].astype(np.int64)
    valid = np.arange(most) < counts[:, None]
    return Selection(chosen, None if bool(valid.all()) else valid)


def _sum_of(masses: Tensor, units: Tensor) -> Tensor:
    """Of some units. float32 [rows, heads]"""
    return (masses * units[:, :, None]).sum(dim=1)


def _repeats(units: Tensor) -> Tensor:
    """True where a row has the same unit further in front. bool [rows, draws]"""
    same = units[:, :, None] == units[:, None, :]
    return same.tril(-1).any(dim=2)
