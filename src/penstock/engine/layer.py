# ruff: noqa: B027 - what only some layers do is empty here
"""Layer: what the engine asks of one layer of a cache, whatever keeps its tokens."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from penstock.core.stats import PhaseStats
from penstock.engine.attention_call import AttentionCall
from penstock.engine.policy import SelectionPolicy
from penstock.engine.slot_transfer import PoolMemory


class Layer(ABC):
    """One layer's keys and values.

    Rows are what selects for itself: sequences, or their KV heads (`HeadRows`).
    """

    layer_idx: int
    length: int
    """Tokens that it holds."""

    # What every layer does ----------------------------------------------------------------------

    @abstractmethod
    def attend(self, call: AttentionCall) -> Tensor:
        """Attend, and take the new tokens in.

        Returns:
            [rows, new_tokens, heads of a row, head_dim]

        Raises:
            FetchError: a read failed.
            StoreFullError: the disk is full.
        """

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor, visible: Tensor | None) -> None:
        """Take new tokens in without attending; both [rows, kv_heads, new_tokens, head_dim].

        Args:
            visible: as in `AttentionCall`.
        """

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forget the tokens at and after `length`."""

    @abstractmethod
    def take_rows_from(self, other: "Layer", rows: Tensor) -> None:
        """Become a copy of `other` (perhaps itself) with row i taken from its row `rows[i]`.

        Args:
            other: of the same kind; its batch may differ.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget every token; memory stays."""

    @abstractmethod
    def close(self) -> None:
        """Let what is under way end; errors that were not asked for stay unsaid."""

    reads_back: ClassVar[bool] = True
    """Whether `read_tokens` works."""

    # What some do ---------------------------------------------------------------------------------

    def can_begin(self, policy: SelectionPolicy) -> bool:
        """Whether `begin` would start a fetch now, ahead of the layer's attention."""
        return False

    def begin(self, query: Tensor) -> None:
        """Start the fetch of the next decode step.

        Args:
            query: true or predicted, post-RoPE. [rows, heads of a row, head_dim]
        """
        raise AssertionError("can_begin() comes first")

    def drop_fetch(self) -> None:
        """Give up a fetch that will not be attended to."""

    def forget_slots(self) -> None:
        """Trust nothing of what the slots hold."""

    def forget_lent_slots(self, lent: Sequence[PoolMemory]) -> None:
        """The same, where slots lie in memory that was lent or do not outlive a pass."""
        self.forget_slots()

    def drain_writes(self) -> None:
        """Wait for every write of tokens. Raises what the writes raised."""

    def drain(self) -> None:
        """Wait for every write. Raises what the writes raised."""

    def make_index(self) -> None:
        """Make the index of a prompt that is in, where one is made and is not there."""

    def index_state(self) -> dict[str, Tensor] | None:
        """What `restore` goes on from; None where the index is made from keys, or there is none."""
        return None

    def restore(self, length: int, state: Mapping[str, Tensor] | None = None) -> None:
        """Go on as if the tokens before `length` had been taken in: their units are in the store.

        Args:
            state: what `index_state` gave where the tokens were taken in.

        Raises:
            FetchError: a read failed.
            ConfigError: the state is another index's.
        """
        raise AssertionError("only layers with a store share a past")

    def read_tokens(self, start: int, end: int) -> Tensor:
        """Keys and values of tokens that are held. [rows, end - start, *shape.token_size]

        Args:
            start: a multiple of the unit's tokens.

        Raises:
            FetchError: a read failed.
        """
        raise AssertionError("reads_back comes first")

    # The device tier ------------------------------------------------------------------------------

    @property
    def is_recordable(self) -> bool:
        """Whether a CUDA graph may hold its decode steps, once `prepare_step` has run."""
        return False

    def prepare_step(self) -> bool:
        """Make ready for decode steps that a CUDA graph may hold; false where there can be none."""
        return False

    def land(self) -> None:
        """Queue what follows behind a fetch that was begun."""

    def forget_recording(self) -> None:
        """What was begun for a recording has not run."""

    def settle(self) -> None:
        """Between steps, now and then: tidy up."""

    def count_into(self, decode: PhaseStats) -> None:
        """Add what steps that the host did not see have asked for since the last call."""
