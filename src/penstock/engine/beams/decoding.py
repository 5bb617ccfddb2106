"""BeamDecoder: what a step-wise search asks of a model and its memory, and the answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Draws one token for each row: (logits [rows, vocabulary], uniforms [rows]) to (token ids int64
[rows], log-probabilities float32 [rows]). Torch operations only, without asking the device
anything: it is recorded into CUDA graphs."""

Stops = Callable[[int, Sequence[int]], bool]
"""Whether a beam's step ends with its newest token: (index of the beam, its tokens of the step)."""


class Beam:
    """One sequence that a decoder holds; made by `prefill` and `fork`, ended by `release`.

    Attributes:
        length: tokens whose keys and values are held.
    """

    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDone:
    """Tells that one group has run to the end of its step; `index` counts from 0."""

    index: int
    num_groups: int
    num_beams: int
    traffic: "StepTraffic"
    """Of the step so far."""


@dataclass(kw_only=True, slots=True)
class StepTraffic:
    """What a step moved between the tiers, and the time that it took."""

    loaded_bytes: int = 0
    """From the slow tier into fast memory."""
    prefetched_bytes: int = 0
    """Of those, asked for before their group's turn."""
    written_bytes: int = 0
    """New keys and values, to the slow tier."""
    copied_bytes: int = 0
    """Within fast memory: a shared block's second copy, a fork's own tail."""
    stall_s: float = 0.0
    """Time in which the model waited for bytes."""
    seconds: float = 0.0
    """Time of the step."""

    def add(self, other: "StepTraffic") -> None:
        """Count another step's in."""
        for name in (
            "loaded_bytes",
            "prefetched_bytes",
            "written_bytes",
            "copied_bytes",
            "stall_s",
            "seconds",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequest:
    """One step of a search: how far, by which draws, and what ends a row before that."""

    num_tokens: int
    """Most new tokens of a beam."""
    uniforms: Tensor
    """The randomness of each beam's t-th token, in [0, 1). float64 [beams, num_tokens]"""
    choose: Choose
    stops: Stops | None = None
    on_group: Callable[[GroupDone], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The new tokens of every beam, and what they took."""

    token_ids: list[list[int]]
    """Per beam, 1 to `num_tokens`."""
    log_probabilities: list[list[float]]
    groups: list[list[int]]
    """Indices of the beams that ran together, in the order of their turns."""
    traffic: StepTraffic


class BeamDecoder(Protocol):
    """A model over a memory for beams."""

    vocabulary: int
    max_tokens: int
    """Most tokens of a sequence, prompt included."""

    def prefill(
        self, token_ids: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> Beam:
        """Read a prompt; `progress` gets the tokens done and the tokens in all.

        Raises:
            BudgetError: fast memory does not hold it.
        """

    def fork(self, beam: Beam, count: int) -> list[Beam]:
        """So many beams that go on from this one, copy-on-write; it stays valid itself."""

    def run_step(self, beams: Sequence[Beam], request: StepRequest) -> StepResult:
        """Extend the beams in place; every new token's keys and values are held afterwards.

        Raises:
            BudgetError: fast memory does not hold a single beam at the step's end.
            FetchError: the slow tier failed.
        """

    def release(self, beam: Beam) -> None:
        """Let a beam go; blocks that no other beam holds are free again."""

    def close(self) -> None:
        """Give files and memory back and the model its attention."""
