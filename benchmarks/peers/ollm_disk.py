"""Peer: oLLM's disk cache on the stock model: every step reads each layer's whole cache back.

Only oLLM's cache class is loaded, by its file: importing the package puts its own layers in the
place of transformers' Llama. The prompt goes in as one piece, as the class needs it.
"""

import importlib.util
import time
from importlib.metadata import distribution
from pathlib import Path
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
    drop_page_cache,
    page_cache_bytes,
    peak_bytes,
    reset_peak,
    serve,
)


def make_cache(request: Request) -> Any:
    """An empty cache with its files in the scratch folder."""
    path = distribution("ollm").locate_file("ollm/kvcache.py")
    spec = importlib.util.spec_from_file_location("ollm_kvcache", Path(str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.KVCache(cache_dir=request.scratch, device="cpu")


def speed(request: Request) -> dict[str, Any]:
    """Fill a cache and decode from it."""
    model = load_model(request)
    load_peak = peak_bytes()
    reset_peak()
    begin_phase("fill")
    start = time.perf_counter()
    cache = make_cache(request)
    token = 1
    if request.prefill == "synthetic":
        for layer, keys, values in synthetic_layers(model, request.context, request.seed):
            cache.update(keys, values, layer)
    else:
        ids = random_prompt(model, request.context, request.seed)
        token = int(read_prompt(model, ids, cache, ids.shape[1]).argmax())
    fill = {"fill_s": time.perf_counter() - start, "fill_peak_bytes": peak_bytes()}
    decoder = GreedyDecoder(model, cache, token, request.context)
    cached: list[int] = []

    def between() -> None:
        cached.append(page_cache_bytes(request.scratch))
        if request.drop_page_cache:
            drop_page_cache(request.scratch)

    between()
    reply = time_decoding(decoder.step, request, between)
    return {
        **reply, **fill, "load_peak_bytes": load_peak, "prefill": request.prefill,
        "page_cache_bytes": max(cached),
        "note": "page cache dropped between steps" if request.drop_page_cache else "",
    }  # fmt: skip


def recall(request: Request) -> dict[str, Any]:
    """Answer the samples."""
    model = load_model(request)

    def answer(sample: dict[str, Any]) -> list[int]:
        cache = make_cache(request)
        ids = torch.tensor([sample["prompt_ids"]])
        token = int(read_prompt(model, ids, cache, ids.shape[1]).argmax())
        return finish_answer(GreedyDecoder(model, cache, token, ids.shape[1]), sample)

    return answer_samples(answer, request)


if __name__ == "__main__":
    serve(speed, recall)
