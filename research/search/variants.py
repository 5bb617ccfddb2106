"""Variants: what `search.speed` compares, and a search with its sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.beams.beam_schedule import ScheduleSettings
from penstock.search.transfer_model import TransferRequest

BASELINE, IN_MEMORY, BEYOND = "layerwise", "resident", "+share"
PAPER = "+prefetch"
"""The paper's whole method; what comes after it goes beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to run a search."""

    strategy: str = "scheduled"
    overlap: bool = False
    balance: bool = False
    prefetch: bool = False
    share: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """What `make_decoder` is called with."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def schedule(self) -> ScheduleSettings:
        """How the engine groups beams for it, as `make_decoder` has it."""
        return ScheduleSettings(
            overlap=self.overlap, balance=self.balance, share=self.share, follow=self.share
        )

    @property
    def in_steps(self) -> bool:
        """Whether the length of a step makes a difference: not where all beams go together."""
        return self.strategy == "scheduled"


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        BASELINE: Variant(strategy="layerwise"),
        "inter-token": Variant(),
        "+inter-beam": Variant(overlap=True),
        PAPER: Variant(overlap=True, balance=True, prefetch=True),
        BEYOND: Variant(overlap=True, balance=True, prefetch=True, share=True),
        IN_MEMORY: Variant(strategy="resident", overlap=True),
    }
)
"""By name, each with what the one before has: the baseline, the paper's method part by part, what
goes beyond it; and everything in fast memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchCase:
    """Sizes of one search.

    Raises:
        ConfigError: a number that no search can have; names the field.
    """

    beams: int
    width: int
    step_tokens: int
    prompt_tokens: int
    new_tokens: int
    block_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < (name != "seed"):
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.beams % self.width:
            raise ConfigError(
                f"beams={self.beams} is not a multiple of width={self.width}: each survivor of a "
                "step goes on as `width` beams"
            )

    @property
    def max_tokens(self) -> int:
        """Of a sequence at the end."""
        return self.prompt_tokens + self.new_tokens

    @property
    def num_steps(self) -> int:
        """The last one may be shorter."""
        return -(-self.new_tokens // self.step_tokens)

    def start_of(self, step: int) -> int:
        """Length of the beams when a step begins."""
        return self.prompt_tokens + step * self.step_tokens

    def tokens_of(self, step: int) -> int:
        """New tokens of a step."""
        return min(self.step_tokens, self.new_tokens - step * self.step_tokens)

    def transfers(self, shape: KVShape, memory_bytes: int) -> TransferRequest:
        """The same for the transfer model.

        Args:
            memory_bytes: fast memory for KV.
        """
        return TransferRequest.of_shape(
            shape, beams=self.beams, width=self.width, step_tokens=self.step_tokens,
            prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens,
            memory_bytes=memory_bytes, block_tokens=self.block_tokens,
        )  # fmt: skip

    def steps_at(self, lengths: list[int], count: int) -> list[list[int]]:
        """The first step and, for each length, `count` steps from the one that begins next to it.

        Raises:
            ConfigError: sizes that cannot be lengthened block by block.
        """
        sizes = (self.prompt_tokens, self.step_tokens)
        if self.new_tokens % self.step_tokens or any(size % self.block_tokens for size in sizes):
            raise ConfigError(
                f"places need whole steps and whole blocks: a prompt of {self.prompt_tokens} and "
                f"steps of {self.step_tokens} tokens must be multiples of {self.block_tokens}, and "
                f"{self.new_tokens} new tokens one of the step; or measure with --whole"
            )
        places, last = [[0]], 0
        for length in sorted(lengths):
            step = round((length - self.prompt_tokens) / self.step_tokens)
            step = min(step, self.num_steps - count)
            if step > last:
                last = step + count - 1
                places.append(list(range(step, step + count)))
        return places
