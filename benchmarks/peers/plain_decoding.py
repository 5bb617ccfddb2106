"""Shared by the peers that sit inside transformers: the model, noise for keys, greedy decoding."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from protocol import Request, begin_phase, time_steps
from torch import Tensor
from transformers import AutoModelForCausalLM

_PIECE = 2048


def prepare_torch(request: Request) -> None:
    """Seed, threads of a prompt, no gradients; the model comes next."""
    torch.manual_seed(request.seed)
    torch.set_num_threads(request.prompt_threads)
    torch.set_grad_enabled(False)
    begin_phase("load")


def load_model(request: Request) -> Any:
    """The model in bf16 with PyTorch's fused attention."""
    prepare_torch(request)
    model: Any = AutoModelForCausalLM.from_pretrained(
        request.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    return model.eval()


def synthetic_layers(model: Any, tokens: int, seed: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Random keys and values for every layer, [1, kv_heads, tokens, head_dim] twice.

    One piece of noise repeated, with other signs in every layer and channel: the time of a step
    depends on the size alone.
    """
    config = model.config
    heads, width = config.num_key_value_heads, config.head_dim
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, 1, heads, min(_PIECE, tokens), width, generator=draw).bfloat16()
    for layer in range(config.num_hidden_layers):
        signs = torch.randint(0, 2, (2, 1, heads, 1, width), generator=draw).mul(2).sub(1)
        keys, values = (noise * signs.bfloat16()).repeat(1, 1, 1, -(-tokens // _PIECE), 1)
        yield layer, keys[:, :, :tokens], values[:, :, :tokens]


def random_prompt(model: Any, tokens: int, seed: int) -> Tensor:
    """Token ids, [1, tokens]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (1, tokens), generator=draw)


def read_prompt(model: Any, ids: Tensor, cache: Any, chunk: int, start: int = 0) -> Tensor:
    """Prefill, `chunk` tokens at a time; the logits of the last token, [vocabulary]."""
    logits: Tensor | None = None
    for at in range(0, ids.shape[1], chunk):
        piece = ids[:, at : at + chunk]
        where = torch.arange(start + at, start + at + piece.shape[1])
        out = model(
            piece, past_key_values=cache, position_ids=where[None], cache_position=where,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        logits = out.logits[0, -1]
    assert logits is not None
    return logits


class GreedyDecoder:
    """Decodes one token per call, with positions counted by itself."""

    def __init__(self, model: Any, cache: Any, token: int, position: int) -> None:
        self._model = model
        self._cache = cache
        self.token = token
        self._position = position

    def step(self) -> int:
        """Feed the newest token; returns the next."""
        where = torch.tensor([self._position])
        out = self._model(
            torch.tensor([[self.token]]), past_key_values=self._cache, position_ids=where[None],
            cache_position=where, use_cache=True,
        )  # fmt: skip
        self.token = int(out.logits[0, -1].argmax())
        self._position += 1
        return self.token


def time_decoding(
    step: Callable[[], Any], request: Request, between: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """`time_steps` with the threads that decoding has."""
    torch.set_num_threads(request.threads)
    return time_steps(step, request, between)


def finish_answer(decoder: GreedyDecoder, sample: dict[str, Any]) -> list[int]:
    """The decoder's first token and those that follow, up to the end-of-sequence token."""
    answer = [decoder.token]
    while answer[-1] != sample["eos_id"] and len(answer) < sample["max_new_tokens"]:
        answer.append(decoder.step())
    return answer
