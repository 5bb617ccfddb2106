"""Where a decode step goes: weights, attention, index, waiting, and the calls between them."""

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.methods.kvswap.policy import KVSwap
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.packed.modules import PackedLinear
from penstock.models.query_projection import decoder_layers

PARTS = ("layers' weights", "output layer", "attention", "index", "waiting", "calls")
_WARM = 3


class Clock:
    """Time of parts that lie within one another: each second belongs to the innermost."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open = ["calls"]
        self._since = time.perf_counter()

    def push(self, part: str) -> None:
        """A part begins."""
        self._turn()
        self._open.append(part)

    def pop(self) -> None:
        """The innermost part ends."""
        self._turn()
        self._open.pop()

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call as a part."""

        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.push(part)
            try:
                return call(*args, **kwargs)
            finally:
                self.pop()

        return timed

    def restart(self) -> None:
        """Forget what was counted."""
        self._turn()
        self.seconds.clear()

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


@torch.no_grad()
def step_parts(
    model: Any, ids: Tensor, memory: str | float, steps: int, store: str
) -> dict[str, float]:
    """Seconds of each part of a decode step behind `ids`, through our cache. [1, tokens]

    Args:
        memory: of the cache; 1.0: everything is resident.
        store: of the cache.

    Raises:
        ConfigError: no layer of the model was found to be linear.
    """
    clock, linear = Clock(), (nn.Linear, PackedLinear)
    inner = {each for layer in decoder_layers(model) for each in layer.modules()}
    named = {each: "layers' weights" for each in inner if isinstance(each, linear)}
    if not named:
        raise ConfigError("no linear layers in the model's decoder")
    named[model.get_output_embeddings()] = "output layer"
    with ExitStack() as stack:
        for module, part in named.items():
            for hook in (
                module.register_forward_pre_hook(lambda *_, part=part: clock.push(part)),
                module.register_forward_hook(lambda *_: clock.pop(), always_call=True),
            ):
                stack.callback(hook.remove)
        policy = KVSwap()
        cache = stack.enter_context(
            TieredCache(model, policy, memory=memory, store=store, max_tokens=ids.shape[1] + 64)
        )
        given = cache_argument(model, cache)
        token = model(ids, **given, logits_to_keep=1).logits[:, -1:].argmax(-1)
        runtime, hooks = cache._runtime, cache._hooks
        for owner, name, part in (
            (runtime, "attend", "attention"), (runtime, "begin_fetch", "index"),
            (getattr(hooks, "_projection", None), "project", "index"),
        ):  # fmt: skip
            if owner is not None:
                setattr(owner, name, clock.around(part, getattr(owner, name)))
        for number in range(_WARM + steps):
            if number == _WARM:
                clock.restart()
                stalled = cache.stats.decode.stall_s
            token = model(token, **given, logits_to_keep=1).logits[:, -1:].argmax(-1)
        clock.push("end")
        stalled = cache.stats.decode.stall_s - stalled
    took = dict(clock.seconds)
    took["waiting"] = min(stalled, took.get("attention", 0.0))
    took["attention"] = took.get("attention", 0.0) - took["waiting"]
    return {part: took.get(part, 0.0) / steps for part in PARTS}
