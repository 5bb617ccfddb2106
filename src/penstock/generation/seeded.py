"""Seeded: draws of one call from a generator of its own, whatever other threads draw."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Scores(Tensor):
    """Scores of the next token whose draws come from one generator.

    `generate` takes no generator. What it makes of these scores is of their kind, as far as the
    draw.
    """

    generator: torch.Generator

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        generator = _generator_in((args, *kwargs.values()))
        if func is torch.multinomial:
            kwargs["generator"] = generator
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        return out if generator is None else _marked(out, generator)


def _generator_in(values: Sequence[Any]) -> torch.Generator | None:
    """That of the first scores among arguments, which may lie in lists."""
    for each in values:
        if type(each) is _Scores:
            return each.generator
        if isinstance(each, list | tuple) and (found := _generator_in(each)) is not None:
            return found
    return None


def _marked(out: Any, generator: torch.Generator) -> Any:
    if isinstance(out, Tensor):
        if not out.is_floating_point():  # tokens and their order: nothing is drawn by them
            return out.as_subclass(Tensor)
        out = out.as_subclass(_Scores)
        out.generator = generator
        return out
    if isinstance(out, tuple):
        marked = [_marked(each, generator) for each in out]
        return type(out)(marked)
    return out


class Seeded:
    """A logits processor that leaves the scores as they are, and seeds what is drawn by them."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """Seed a generator.

        Args:
            device: of the scores.
        """
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The same scores. [batch, vocabulary]"""
        marked: Tensor = _marked(scores, self._generator)
        return marked
