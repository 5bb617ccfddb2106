"""Request: a prompt with its settings, as `Engine.submit` takes it."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.generation.prompts import Prompt, TokenIds
from penstock.generation.sampling import SamplingParams
from penstock.models.cache_adapter import TieredCache


class Beginning(Protocol):
    """A text whose KV is kept, and that prompts stand behind; a `Document` is one."""

    @property
    def tokens(self) -> TokenIds | list[int]:
        """Token ids of the text."""

    def cache(
        self, *, new_tokens: int, batch_size: int, memory: Any, **options: Any
    ) -> TieredCache:
        """A cache that holds the text in every row, with room for more."""


class StoredBeginnings(Protocol):
    """What answered requests have left for later ones; `Sessions` is one."""

    def open(
        self, salt: str, tokens: Sequence[int], *, behind: Beginning | None, max_tokens: int,
        batch_size: int, memory: Any, **options: Any,
    ) -> TieredCache | None:  # fmt: skip
        """A cache that holds the longest stored beginning of some tokens; None: there is none, or
        not more than the text that they stand behind."""

    def is_storing(self, salt: str, *, behind: Beginning | None) -> bool:
        """Whether something of a salt is on its way; `open` would wait for it."""

    def keep(
        self, salt: str, tokens: Sequence[int], cache: TieredCache, *, behind: Beginning | None
    ) -> "Future[None] | None":
        """Begin to store what a cache holds, which is free when that is done; None: it is now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is asked of an `Engine`.

    Stop strings, `n`, `seed`, `logprobs`, bias and `logits_processors` (a grammar's) are fields of
    the sampling settings.
    """

    prompt: Prompt
    """One prompt, as `LLM.generate` takes it: a text, token ids (a chat template's, perhaps with
    pictures), or a dict of either."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    document: Beginning | None = None
    """A stored text that the prompt stands behind, with nothing between. It stays open until the
    request is over."""
    cache_salt: str = ""
    """Requests of different salts share no stored KV."""
    attended_parts: int = 0
    """Say in how many parts what the answer has attended to (`Finished.attended`); 0: do not."""
    priority: int = 0
    """Lower ones are admitted first; among equals, older ones."""
