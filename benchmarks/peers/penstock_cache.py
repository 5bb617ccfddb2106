"""Peer: Penstock's own TieredCache, in the same kind of process as the others."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from packed_model import packed_model
from plain_decoding import (
    GreedyDecoder,
    load_model,
    prepare_torch,
    random_prompt,
    read_prompt,
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
    weights_of,
)

from penstock import TieredCache
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import random_adapter
from penstock.workloads.synthetic_kv import SyntheticKV


def make_cache(model: Any, request: Request, tokens: int, adapter: Any = None) -> TieredCache:
    """An empty cache: `setting` is a policy."""
    return TieredCache(
        model, request.cache, memory=request.keep, store=request.scratch, max_tokens=tokens,
        adapter=adapter,
    )  # fmt: skip


def open_model(request: Request) -> Any:
    """The model, its weights as the setting says: "kvswap-int4"."""
    weights = weights_of(request.setting)
    if weights == "bf16":
        return load_model(request)
    prepare_torch(request)
    return packed_model(Path(request.model), weights)


def speed(request: Request) -> dict[str, Any]:
    """Fill a cache and decode from it."""
    model = open_model(request)
    adapter = random_adapter(model, request.seed)
    load_peak = peak_bytes()
    reset_peak()
    begin_phase("fill")
    start = time.perf_counter()
    token = 1
    with make_cache(model, request, request.context + request.steps + 64, adapter) as cache:
        if request.prefill == "synthetic":
            document = SyntheticKV(inspect_model(model).kv, 1, torch.device("cpu"), request.seed)
            document.fill(cache, request.context)
            del document
        else:
            ids = random_prompt(model, request.context, request.seed)
            token = int(read_prompt(model, ids, cache, request.chunk).argmax())
        fill = {"fill_s": time.perf_counter() - start, "fill_peak_bytes": peak_bytes()}
        decoder = GreedyDecoder(model, cache, token, request.context)
        reply = time_decoding(decoder.step, request)
        return {
            **reply, **fill, "load_peak_bytes": load_peak, "prefill": request.prefill,
            "ledger_bytes": cache.report().used_bytes, "note": f"{request.keep} of the cache",
        }  # fmt: skip


def prompt(request: Request) -> dict[str, Any]:
    """Read a prompt, or two chunks of it."""
    model = open_model(request)
    adapter = random_adapter(model, request.seed)

    @contextmanager
    def opened(before: int) -> Iterator[Callable[[int], Any]]:
        with make_cache(model, request, request.context + 64, adapter) as cache:
            if before:
                kv = inspect_model(model).kv
                SyntheticKV(kv, 1, torch.device("cpu"), request.seed).fill(cache, before)

            def read(tokens: int) -> None:
                ids = random_prompt(model, tokens, request.seed)
                read_prompt(model, ids, cache, request.chunk, before)

            yield read

    return time_prompt(opened, request)


def recall(request: Request) -> dict[str, Any]:
    """Answer the samples with plain `generate`."""
    model = open_model(request)

    def answer(sample: dict[str, Any]) -> list[int]:
        ids = torch.tensor([sample["prompt_ids"]])
        tokens = ids.shape[1] + sample["max_new_tokens"]
        with make_cache(model, request, tokens) as cache:
            out = model.generate(
                ids, past_key_values=cache, max_new_tokens=sample["max_new_tokens"],
                do_sample=False, prefill_chunk_size=request.chunk,
                attention_mask=torch.ones_like(ids), pad_token_id=0,
            )  # fmt: skip
        found: list[int] = out[0, ids.shape[1] :].tolist()
        return found

    return answer_samples(answer, request)


if __name__ == "__main__":
    serve(speed, recall, prompt)
