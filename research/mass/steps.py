"""MassSteps: a cache that decodes a given text, and the true mass of each of its steps."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.engine.attention_call import AttentionCall
from penstock.evaluate.audit.fidelity import attention_shares, captured_mass
from penstock.methods.kvswap.mass_layer import MassLayer
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM

Z95 = 1.96
"""Standard deviations on either side of a mean that hold 95 % of a normal distribution."""


@dataclass
class Step:
    """Means over the layers of one decode step."""

    true: float = 0.0
    said: float = 0.0
    variance: float = 0.0
    tokens: float = 0.0
    """Attended to, of one layer."""


@dataclass
class MassSteps:
    """Feeds a text token by token to a cache under KVSwap, and looks at every layer's attention.

    True mass is that of the step's own queries on all keys that the cache has taken in: what the
    estimate is of. Full attention's own queries differ once something was missed.
    """

    model: CausalLM
    cache: TieredCache
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    """Of all forward passes, without looking."""
    _keys: list[Tensor] = field(default_factory=list)
    _calls: dict[int, AttentionCall] = field(default_factory=dict)
    _attended: dict[int, Tensor] = field(default_factory=dict)

    def prefill(self, ids: Tensor, chunk: int) -> None:
        """Read a prompt. int64 [1, tokens]"""
        for at in range(0, ids.shape[1], chunk):
            self._forward(ids[:, at : at + chunk])
        tiers, room = self.cache.tiers, self.cache.max_tokens
        for layer in range(len(tiers.layers)):
            tokens = tiers.read_tokens(layer, 0, ids.shape[1])[:, :, 0].transpose(1, 2)
            whole = tokens.new_empty(*tokens.shape[:2], room, tokens.shape[3])
            whole[:, :, : ids.shape[1]] = tokens
            self._keys.append(whole)

    def decode(self, token: Tensor) -> Step:
        """Feed a token. int64 [1, 1]"""
        layers = self.cache.tiers.layers
        self._calls.clear()
        self._attended.clear()
        for layer in layers:
            self._watch(layer)
        began = time.perf_counter()
        self._forward(token)
        self.seconds += time.perf_counter() - began
        step, length = Step(), self.cache.get_seq_length()
        for number, layer in enumerate(layers):
            del layer.attend
            call = self._calls[number]
            self._keys[number][:, :, length - 1 : length] = call.keys
            keys = self._keys[number][:, :, :length]
            shares = attention_shares(
                call.query[:, :, 0], keys, None, scaling=call.scaling, softcap=call.softcap
            )
            seen = self._attended[number]
            step.true += float(captured_mass(shares, seen[:, None])) / len(layers)
            step.tokens += int(seen.sum()) / len(layers)
            found = layer.estimate if isinstance(layer, MassLayer) else None
            step.said += (1.0 if found is None else float(found.captured)) / len(layers)
            if found is not None:
                step.variance += float(found.variance) / len(layers) ** 2
        self.steps.append(step)
        return step

    def _watch(self, layer: Any) -> None:
        kind, number = type(layer), layer.layer_idx

        def attend(call: AttentionCall) -> Tensor:
            self._calls[number] = call
            out: Tensor = kind.attend(layer, call)
            return out

        layer.attend = attend
        layer.observer = lambda index, seen: self._attended.__setitem__(index, seen)

    def _forward(self, ids: Tensor) -> None:
        called: Any = self.model
        with torch.no_grad():
            called(ids, **cache_argument(called, self.cache), use_cache=True, logits_to_keep=1)

    def figures(self) -> dict[str, Any]:
        """Errors, bars and costs over all steps."""
        steps, counters = self.steps, self.cache.stats.decode.counters
        errors = [step.said - step.true for step in steps]
        bars = [Z95 * math.sqrt(step.variance) for step in steps]
        count = len(steps)
        held = sum(abs(error) <= bar for error, bar in zip(errors, bars, strict=True))
        decode, seen = self.cache.stats.decode, counters.get("mass_steps", 0)
        return {
            "steps": count, "true_mass": sum(step.true for step in steps) / count,
            "said_mass": sum(step.said for step in steps) / count,
            "mean_error": sum(errors) / count,
            "mean_absolute_error": sum(map(abs, errors)) / count,
            "largest_error": max(map(abs, errors)), "bar": sum(bars) / count,
            "held_by_bars": held / count,
            "attended_tokens": sum(step.tokens for step in steps) / count,
            "wanted_units": decode.units_wanted / count / len(self.cache.tiers.layers),
            "read_bytes": decode.read_bytes / count, "seconds": self.seconds / count,
            "capped": counters.get("mass_capped", 0) / seen if seen else 0.0,
            "read_again": counters.get("mass_read_again", 0) / seen if seen else 0.0,
            "exact": counters.get("mass_exact", 0) / seen if seen else 0.0,
        }  # fmt: skip
