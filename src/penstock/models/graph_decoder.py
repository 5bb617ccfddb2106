"""GraphDecoder: a model's decode step as one CUDA graph, over a cache in the device tier."""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from penstock.core.on_device import on_device
from penstock.engine.device_tier.device_index import SETTLE_STEPS
from penstock.engine.device_tier.device_steps import make_ready
from penstock.engine.device_tier.recording import recording
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.models.cache_argument import (
    CACHE_NAMES,
    OUTPUT_NAME,
    cache_argument,
    cache_name_in,
)
from penstock.models.fused_step import fused_parts
from penstock.models.shared_part import SharedPart, Undo
from penstock.models.weight_access import model_device

if TYPE_CHECKING:
    from penstock.models.cache_adapter import TieredCache

WARM_UP_STEPS = 1
"""Steps run one launch at a time first: kernels are compiled and workspaces made in them."""
_PLAIN = {"input_ids", *CACHE_NAMES, "attention_mask", "position_ids", "use_cache",
          "return_dict", "logits_to_keep", "cache_position"}  # fmt: skip
"""Arguments of `forward` under which a replay says the same as a call."""


class GraphDecoder:
    """A cache's own part of its model's `forward`, while the cache is open.

    A step of one token over a cache whose layers are all in the device tier is recorded once and
    replayed from then on: an 8B model's step is some thousand launches, which Python makes in 30 to
    40 ms and a graph in three. Whatever else comes goes to the model's own `forward`, and so does
    every step if recording fails (a model that asks the device in between); a notice says so.

    A model has one `forward` for all of its caches: it asks the cache of the call.
    """

    def __init__(
        self, model: PreTrainedModel, cache: "weakref.ref[TieredCache]", runtime: TieredRuntime
    ) -> None:
        """Have the model ask its caches; `remove` ends that with the last of them."""
        self._model: Any = model
        self._cache, self._runtime = cache, runtime
        self._device = model_device(model)
        self._takes_last = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._graph: torch.cuda.CUDAGraph | None = None
        self._layers: list[Any] | None = None
        self._ids = self._positions = self._logits = torch.empty(0)
        self._steps = 0
        self._failed = False
        self._part = SharedPart(model, "forward", functools.partial(_put_forward, model))

    def remove(self) -> None:
        """Free the graph's memory; the last of a model's caches gives it back its `forward`."""
        self._part.leave()
        self._failed = True
        self._graph, self._layers = None, None
        self._logits = torch.empty(0)

    def step(self, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """What the model's `forward` says, or a replay of it.

        Args:
            forward: the model's own.
            kwargs: its arguments, all by name.
        """
        with on_device(self._device):
            return self._step(forward, kwargs)

    def _step(self, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        if not self._may_replay(kwargs):
            return forward(**kwargs)
        ids: Tensor = kwargs["input_ids"]
        runtime = self._runtime
        if self._layers is not runtime.layers:
            self._graph, self._layers, self._steps = None, runtime.layers, 0
        positions = kwargs.get("position_ids")
        positions = self._next_positions() if positions is None else positions
        if self._graph is None:
            self._steps += 1
            if self._steps <= WARM_UP_STEPS:
                with fused_parts(self._model):
                    return forward(**kwargs)
            settling = runtime.length % SETTLE_STEPS == 0
            if settling or not self._record(forward, ids, positions):
                return forward(**kwargs)
        else:
            assert runtime.device_steps is not None
            runtime.device_steps.settle(runtime.length)
            self._ids.copy_(ids)
            self._positions.copy_(positions)
            runtime.replayed()
        assert self._graph is not None
        self._graph.replay()
        return CausalLMOutputWithPast(logits=self._logits.clone(), **{OUTPUT_NAME: self._cache()})

    def _may_replay(self, kwargs: dict[str, Any]) -> bool:
        ids, runtime = kwargs.get("input_ids"), self._runtime
        given = {name for name, value in kwargs.items() if value is not None}
        return (
            not self._failed
            and ids is not None
            and ids.shape[1] == 1
            and given <= _PLAIN
            and kwargs.get(cache_name_in(kwargs)) is self._cache()
            and kwargs.get("return_dict", True) is not False
            and not torch.is_grad_enabled()
            and runtime.length > 0
            and runtime.length < runtime.settings.max_tokens
            and ids.shape[0] == runtime.batch
            and not runtime.is_torn
            and self._whole_model()
            and make_ready(runtime.layers)
        )

    def _whole_model(self) -> bool:
        """Whether all of the model's layers are in the tiers (none keeps a sliding window), and
        positions follow from places."""
        cache = self._cache()
        if cache is None or len(cache.layers) != len(self._runtime.layers):
            return False
        # A replay asks no hook where the rows' next tokens stand.
        return cache.decoder_calls is None or not cache.decoder_calls.has_axes

    def _next_positions(self) -> Tensor:
        """Positions of the step's tokens, padding not counted. int64 [batch, 1]"""
        steps = self._runtime.device_steps
        assert steps is not None
        start = steps.clock.start[:: steps.clock.start.shape[0] // self._runtime.batch]
        return (steps.clock.position - start).unsqueeze(1)

    def _record(self, forward: Callable[..., Any], ids: Tensor, positions: Tensor) -> bool:
        """Record the step; nothing of it has run yet when this returns."""
        runtime = self._runtime
        self._ids, self._positions = ids.clone(), positions.clone()
        lengths = runtime.lengths
        options: dict[str, Any] = {"logits_to_keep": 1} if self._takes_last else {}
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with fused_parts(self._model), recording(graph):
                out = forward(
                    input_ids=self._ids, position_ids=self._positions, attention_mask=None,
                    **cache_argument(self._model, self._cache()), use_cache=True, **options,
                )  # fmt: skip
        except (RuntimeError, ValueError, TypeError) as error:
            self._failed = True
            runtime.forget_recording(lengths)
            cache = self._cache()
            if cache is not None:
                cache.forget_awaited()
                reason = str(error).splitlines()[0]
                cache.notices.append(f"decoding without a CUDA graph: {reason}")
            return False
        self._graph, self._logits = graph, out.logits
        return True


def _put_forward(model: Any) -> Undo:
    """Have `model.forward` ask the cache of a call for its `GraphDecoder`; returns what undoes it.

    Callers need not name their arguments: transformers' `generate` does, others do not.
    """
    own, plain = model.__dict__.get("forward"), model.forward
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [
        name for name, each in inspect.signature(plain).parameters.items() if each.kind in by_place
    ]

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args, strict=False)) | kwargs
        decoder = getattr(named.get(cache_name_in(named)), "graph_decoder", None)
        if decoder is None or len(named) != len(args) + len(kwargs):
            return plain(*args, **kwargs)
        return decoder.step(plain, named)

    def undo() -> None:
        if model.__dict__.get("forward") is not forward:
            return  # another stands before it now, and goes on to call it
        if own is None:
            del model.forward
        else:
            model.forward = own

    model.forward = forward
    return undo
