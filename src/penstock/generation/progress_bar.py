"""ProgressBar: how far a call is, on stderr where somebody can see it."""

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

_WAIT_S = 1.0
"""Calls that are over sooner show nothing."""


class ProgressBar:
    """A bar of prompt tokens while prompts are read, and of new tokens behind."""

    def __init__(self, use_tqdm: bool | Callable[..., Any]) -> None:
        """Show one where there is a terminal, or as a function of the caller makes it.

        Args:
            use_tqdm: as vLLM has it: whether to; or what is called as tqdm is.
        """
        self._make: Callable[..., Any] | None = None
        if callable(use_tqdm):
            self._make = use_tqdm
        elif use_tqdm and sys.stderr.isatty():
            self._make = lambda **options: tqdm(delay=_WAIT_S, leave=False, **options)
        self._bar: Any = None
        self._phase = ""

    @property
    def is_shown(self) -> bool:
        """Whether anything is drawn."""
        return self._make is not None

    def on_prefill(self, done: int, total: int) -> None:
        """So many tokens of the prompts are read."""
        self._update("Reading prompts", done, total)

    def counting(self, total: int) -> Callable[[int], None] | None:
        """What to call behind each step with the tokens that it has added.

        Args:
            total: most tokens of all answers.
        """
        if not self.is_shown:
            return None
        done = 0

        def on_step(new: int) -> None:
            nonlocal done
            done += new
            self._update("Answering", done, total)

        return on_step

    def close(self) -> None:
        """Take it off the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _update(self, phase: str, done: int, total: int) -> None:
        if self._make is None:
            return
        if self._bar is None or phase != self._phase or self._bar.n > done:
            self.close()
            self._phase = phase
            self._bar = self._make(total=total, desc=phase, unit=" tokens")
        self._bar.update(done - self._bar.n)
