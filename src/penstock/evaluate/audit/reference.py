"""The reference of an audit: what full attention says behind a prompt, and where it looks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.core.errors import PromptError
from penstock.engine.attention_call import AttentionCall
from penstock.evaluate.audit.fidelity import attention_shares
from penstock.evaluate.audit.tap import AttentionTap
from penstock.generation.prompts import PromptBatch
from penstock.models.beside_tiers import BesideTiers
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM, LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import plain_cache, tokens_of
from penstock.models.state_sizes import require_chunks
from penstock.workloads.prefilled import EXACT_TAIL

Counter = Callable[[int], None]
"""Called with the tokens or steps done so far."""


def forward(model: CausalLM, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
    """Feed tokens behind what a cache holds.

    Args:
        ids: int64 [batch, new_tokens]
        mask: 0 at padding, for past and new tokens. int64 [batch, past + new_tokens]

    Returns:
        Log-probabilities of the token behind the last one, on the model's device.
        float32 [batch, vocabulary]
    """
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    decoder: Any = model
    with torch.no_grad():
        out = decoder(
            ids, attention_mask=mask, position_ids=positions, **cache_argument(decoder, cache),
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
    return torch.log_softmax(out.logits[:, -1].float(), dim=-1)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The teacher's tokens, its distributions and its attention, for every policy to be held to.

    The text is the same for all: tokens are the most likely ones of full attention, or those of a
    given text, and are fed to every policy. Attention is the reference's own, its queries on its
    keys: of what full attention looks at, how much does a policy have? A policy's own queries
    differ a little once it has missed something.
    """

    prompt: PromptBatch
    mask: Tensor
    """0 at padding. int64 [batch, prompt + steps], on the model's device"""
    prefix: list[tuple[Tensor, Tensor]]
    """Keys and values of the prompt but its tail, by tiered layer; each [batch, kv_heads, tokens,
    head_dim]."""
    beside: BesideTiers
    """Sliding windows and recurrent states behind the same tokens."""
    tokens: Tensor
    """What is fed at each step. int64 [batch, steps], on the model's device"""
    live: Tensor
    """False from a row's end-of-sequence token on. bool [batch, steps]"""
    log_probs: list[Tensor]
    """Of the token behind, by step, on the model's device. float32 [batch, vocabulary]"""
    shares: list[list[Tensor]]
    """By step and tiered layer, see `attention_shares`, on the CPU: in all steps / head_dim times
    the bytes of the full cache in bfloat16. Empty for steps that were not looked at.
    float32 [batch, kv_heads, prompt + step + 1]"""

    @property
    def num_steps(self) -> int:
        """Decode steps."""
        return len(self.log_probs)

    @property
    def prefix_tokens(self) -> int:
        """Tokens that a cache is given; the rest of the prompt goes through it."""
        return self.prefix[0][0].shape[2] if self.prefix else 0

    def fill(self, model: CausalLM, cache: TieredCache) -> None:
        """Give an empty cache the prompt: what was computed once, and its tail through the cache.

        Methods that look at the prompt's last queries see them in the tail.
        """
        end, total = self.prefix_tokens, self.prompt.padded_tokens
        if end > 0:
            visible = self.mask[:, :end].bool()
            for layer, (keys, values) in enumerate(self.prefix):
                cache.tiers.append(layer, keys, values, None if visible.all() else visible)
            self.beside.hold(cache, end)
        ids = self.prompt.input_ids[:, end:].to(self.mask.device)
        forward(model, ids, self.mask[:, :total], cache)


def end_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """Tokens that end an answer."""
    model: Any = loaded.model
    ends = model.generation_config.eos_token_id
    if ends is None and loaded.tokenizer is not None:
        ends = loaded.tokenizer.eos_token_id
    return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)


def make_reference(
    loaded: LoadedModel, prompt: PromptBatch, *, new_tokens: int, chunk: int,
    ends: frozenset[int], following: Tensor | None = None, look_every: int = 1,
    on_prefill: Counter = lambda _: None, on_step: Counter = lambda _: None,
) -> Reference:  # fmt: skip
    """Read a prompt with the plain model and decode with full attention.

    Args:
        new_tokens: most decode steps; fewer when every row has ended.
        chunk: prompt tokens per forward pass.
        ends: tokens after which a row no longer counts.
        following: tokens to feed; None: the likeliest ones. int64 [batch, new_tokens]
        look_every: attention is kept of the first step and of every so many.
        on_prefill: called after every chunk.
        on_step: called after every decode step.

    Raises:
        PromptError: the answer ends at once, so that there is nothing to compare.
        UnsupportedModelError: the model reads prompts whole only.
    """
    model = loaded.model
    require_chunks(model)
    shape = inspect_model(model)
    device = model.get_input_embeddings().weight.device
    total = prompt.padded_tokens
    shortest = min(len(ids) for ids in prompt.token_ids)
    prefix_end = max(0, total - min(EXACT_TAIL, max(2, shortest - 2)))
    ids = prompt.input_ids.to(device)
    mask = torch.cat([prompt.attention_mask, torch.ones(len(ids), new_tokens)], dim=1).long()
    mask = mask.to(device)
    cache: Any = plain_cache(model, "dynamic", total + new_tokens)
    for start in range(0, prefix_end, chunk):
        end = min(start + chunk, prefix_end)
        forward(model, ids[:, start:end], mask[:, :end], cache)
        on_prefill(end)
    beside = BesideTiers(cache, shape.tiered_layers)
    log_probs = forward(model, ids[:, prefix_end:], mask[:, :total], cache)
    on_prefill(total)
    steps = _decode(
        loaded, cache, mask, log_probs, total=total, new_tokens=new_tokens, ends=ends,
        following=following, look_every=look_every, on_step=on_step,
    )  # fmt: skip
    if not steps:
        raise PromptError(
            "the model ends its answer at once, so that there is no step to audit; ask something, "
            "or go on regardless with --past-end"
        )
    prefix = []
    if prefix_end:
        for layer in shape.tiered_layers:
            keys, values = tokens_of(cache, layer, shape.kv)
            prefix.append((keys[:, :, :prefix_end], values[:, :, :prefix_end]))
    return Reference(
        prompt=prompt, mask=mask[:, : total + len(steps)], prefix=prefix, beside=beside,
        tokens=torch.stack([step.fed for step in steps], dim=1).to(device),
        live=torch.stack([step.live for step in steps], dim=1),
        log_probs=[step.log_probs for step in steps], shares=[step.shares for step in steps],
    )  # fmt: skip


class _Taught(NamedTuple):
    """One decode step; see `Reference`."""

    fed: Tensor
    live: Tensor
    log_probs: Tensor
    shares: list[Tensor]


def _decode(
    loaded: LoadedModel, cache: Any, mask: Tensor, log_probs: Tensor, *, total: int,
    new_tokens: int, ends: frozenset[int], following: Tensor | None, look_every: int,
    on_step: Counter,
) -> list[_Taught]:  # fmt: skip
    """Decode behind a prompt of `total` tokens; see `make_reference`."""
    shape = inspect_model(loaded.model)
    seen: dict[int, Tensor] = {}

    def see(number: int, call: AttentionCall) -> None:
        if len(steps) % look_every:
            return
        seen[number] = attention_shares(
            call.query[:, :, 0], call.keys, call.visible, scaling=call.scaling,
            softcap=call.softcap,
        ).cpu()  # fmt: skip

    alive, steps = torch.ones(len(mask), dtype=torch.bool), list[_Taught]()
    tap = AttentionTap(cache, shape, see)
    with tap.watching(loaded.model):
        for step in range(new_tokens):
            fed = log_probs.argmax(dim=-1).cpu() if following is None else following[:, step]
            alive = alive & torch.tensor([token not in ends for token in fed.tolist()])
            if not alive.any():
                break
            visible = mask[:, : total + step + 1]
            log_probs = forward(loaded.model, fed[:, None].to(mask.device), visible, cache)
            tap.check_all_seen()
            shares = [seen.pop(number) for number in sorted(seen)]
            steps.append(_Taught(fed, alive, log_probs, shares))
            on_step(step + 1)
    return steps
