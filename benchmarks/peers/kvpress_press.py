"""Peer: kvpress's pruning presses, which keep a share of the cache and forget the rest for good.

The document is compressed without the question, as in kvpress's own pipeline.
"""

import time
from typing import Any

import kvpress
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
)
from transformers import DynamicCache

_PRESSES = {
    "snapkv": "SnapKVPress",
    "expected_attention": "ExpectedAttentionPress",
    "knorm": "KnormPress",
    "streaming_llm": "StreamingLLMPress",
}


def read_pruned(model: Any, ids: torch.Tensor, cache: Any, request: Request) -> None:
    """Prefill in one piece, as the presses need it, with the cache pruned layer by layer."""
    press = getattr(kvpress, _PRESSES[request.setting])(compression_ratio=1 - request.kept_share)
    with press(model):
        model.model(input_ids=ids, past_key_values=cache)


def speed(request: Request) -> dict[str, Any]:
    """Decode from a pruned cache."""
    model = load_model(request)
    load_peak = peak_bytes()
    reset_peak()
    begin_phase("fill")
    start = time.perf_counter()
    cache = DynamicCache()
    if request.prefill == "synthetic":
        kept = int(request.context * request.kept_share)
        for layer, keys, values in synthetic_layers(model, kept, request.seed):
            cache.update(keys, values, layer)
    else:
        read_pruned(model, random_prompt(model, request.context, request.seed), cache, request)
    fill = {"fill_s": time.perf_counter() - start, "fill_peak_bytes": peak_bytes()}
    decoder = GreedyDecoder(model, cache, 1, request.context)
    return {
        **time_decoding(decoder.step, request), **fill, "load_peak_bytes": load_peak,
        "prefill": request.prefill, "note": "synthetic: only the kept tokens were put in"
        if request.prefill == "synthetic" else "",
    }  # fmt: skip


def recall(request: Request) -> dict[str, Any]:
    """Answer the samples."""
    model = load_model(request)

    def answer(sample: dict[str, Any]) -> list[int]:
        cache, start = DynamicCache(), sample["question_start"]
        ids = torch.tensor([sample["prompt_ids"]])
        read_pruned(model, ids[:, :start], cache, request)
        question = ids[:, start:]
        token = int(read_prompt(model, question, cache, question.shape[1], start).argmax())
        return finish_answer(GreedyDecoder(model, cache, token, ids.shape[1]), sample)

    return answer_samples(answer, request)


if __name__ == "__main__":
    serve(speed, recall)
