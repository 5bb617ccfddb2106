"""Peer: the caches of transformers itself, DynamicCache and QuantizedCache, all in memory."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from plain_decoding import (
    GreedyDecoder,
    finish_answer,
    load_model,
    random_prompt,
    read_prompt,
    synthetic_layers,
    time_decoding,
)
from protocol import (
    Request,
    answer_samples,
    begin_phase,
    peak_bytes,
    reset_peak,
    serve,
    time_prompt,
)
from transformers import DynamicCache, QuantizedCache

_BITS = 4


def make_cache(model: Any, setting: str) -> Any:
    """An empty cache: "dynamic", or quantised by "quanto" or "hqq" with transformers' defaults."""
    if setting == "dynamic":
        return DynamicCache(config=model.config)
    axes = {"axis_key": 1, "axis_value": 1} if setting == "hqq" else {}
    return QuantizedCache(backend=setting, config=model.config, nbits=_BITS, **axes)


def piece_tokens(request: Request, ids: torch.Tensor) -> int:
    """Tokens per forward pass: a quantised cache takes the prompt whole, or quantises it often."""
    return request.chunk if request.setting == "dynamic" else ids.shape[1]


def speed(request: Request) -> dict[str, Any]:
    """Fill a cache and decode from it."""
    model = load_model(request)
    load_peak = peak_bytes()
    reset_peak()
    begin_phase("fill")
    start = time.perf_counter()
    cache = make_cache(model, request.setting)
    token = 1
    if request.prefill == "synthetic":
        for layer, keys, values in synthetic_layers(model, request.context, request.seed):
            cache.layers[layer].update(keys, values)
    else:
        ids = random_prompt(model, request.context, request.seed)
        token = int(read_prompt(model, ids, cache, piece_tokens(request, ids)).argmax())
    fill = {"fill_s": time.perf_counter() - start, "fill_peak_bytes": peak_bytes()}
    decoder = GreedyDecoder(model, cache, token, request.context)
    return {
        **time_decoding(decoder.step, request), **fill, "load_peak_bytes": load_peak,
        "prefill": request.prefill,
    }  # fmt: skip


def prompt(request: Request) -> dict[str, Any]:
    """Read a prompt, or two chunks of it."""
    model = load_model(request)

    @contextmanager
    def opened(before: int) -> Iterator[Callable[[int], Any]]:
        cache = make_cache(model, request.setting)
        if before:
            for layer, keys, values in synthetic_layers(model, before, request.seed):
                cache.layers[layer].update(keys, values)

        def read(tokens: int) -> None:
            ids = random_prompt(model, tokens, request.seed)
            read_prompt(model, ids, cache, piece_tokens(request, ids), before)

        yield read

    return time_prompt(opened, request)


def recall(request: Request) -> dict[str, Any]:
    """Answer the samples."""
    model = load_model(request)

    def answer(sample: dict[str, Any]) -> list[int]:
        cache = make_cache(model, request.setting)
        ids = torch.tensor([sample["prompt_ids"]])
        token = int(read_prompt(model, ids, cache, piece_tokens(request, ids)).argmax())
        return finish_answer(GreedyDecoder(model, cache, token, ids.shape[1]), sample)

    return answer_samples(answer, request)


if __name__ == "__main__":
    serve(speed, recall, prompt)
