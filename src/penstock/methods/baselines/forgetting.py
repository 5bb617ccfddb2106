"""ForgettingPolicy: what methods that drop tokens have in common."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from penstock.core.errors import ConfigError
from penstock.core.selection import Selection
from penstock.core.slot_plan import SizingRequest
from penstock.engine.key_index import KeyIndex
from penstock.engine.policy import SelectionPolicy, top_units
from penstock.engine.retrieval_policy import BaselinePolicy, IndexSize
from penstock.methods.baselines.attention_history import AttentionHistoryIndex


@dataclass(frozen=True, kw_only=True)
class ForgettingPolicy(BaselinePolicy):
    """A method whose index gives minus infinity to tokens that it has forgotten.

    The first selection after the prompt makes the cut; afterwards what is kept competes with what
    leaves the window. Selection and slots are of one size, so that the slots hold the survivors and
    nothing else.

    Common differences: the originals keep the survivors in device memory and have nothing below;
    here every token goes to the store, and is read from it once, when it is first kept. The prompt
    itself, and every later input of several tokens, is attended to in full.
    """

    drops: ClassVar[bool] = True

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_tokens != 1:
            raise ConfigError(f"group_tokens={self.group_tokens}: {self.name} keeps single tokens")
        if self.selected_tokens is not None and self.selected_tokens < 2:
            raise ConfigError(f"selected_tokens={self.selected_tokens} must be at least 2")
        if self.reuse_tokens not in (None, 0):
            raise ConfigError(
                f"reuse_tokens={self.reuse_tokens}: {self.name} attends to what it keeps and to "
                "nothing else; it must be None or 0"
            )

    @override
    def select(
        self,
        index: KeyIndex,
        query: Tensor,
        first_unit: NDArray[np.int64],
        end_unit: int,
        wanted: int,
    ) -> Selection:
        """The forgotten are not valid choices."""
        scores = index.score(query, end_unit)
        unit_ids = top_units(scores, first_unit, wanted).unit_ids
        chosen = scores.gather(1, torch.from_numpy(unit_ids).to(scores.device))
        valid = (chosen > float("-inf")).cpu().numpy() & (unit_ids >= first_unit[:, None])
        return Selection(unit_ids, None if valid.all() else valid)


@dataclass(frozen=True, kw_only=True)
class HistoryPolicy(ForgettingPolicy):
    """A method that keeps what attention has valued, per KV head."""

    per_head: ClassVar[bool] = True

    window_queries: int = 32
    """Newest queries of the prompt that value it, at most 32."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        most = AttentionHistoryIndex.num_prompt_queries
        if not 1 <= self.window_queries <= most:
            raise ConfigError(f"window_queries={self.window_queries} must be from 1 to {most}")

    @override
    def index_sizes(self, request: SizingRequest) -> list[tuple[SelectionPolicy, IndexSize]]:
        """A value per token has one size."""
        sizes = {"batch": request.batch, "max_units": request.max_tokens}
        held = AttentionHistoryIndex.num_bytes(request.shape, **sizes)
        return [
            (self, IndexSize(held, AttentionHistoryIndex.scratch_bytes(request.shape, **sizes)))
        ]
