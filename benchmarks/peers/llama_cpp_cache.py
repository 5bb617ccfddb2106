"""Peer: llama.cpp through llama-cpp-python, the same weights as GGUF, the whole cache in memory.

The option "mapped" leaves weights in the file's pages (by default they are packed anew for the
processor, in memory of their own), "unfused" is attention without the fused kernel.
"""

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
from llama_state import widen
from protocol import (
    Request,
    answer_samples,
    begin_phase,
    drop_page_cache,
    peak_bytes,
    reset_peak,
    serve,
    time_prompt,
    time_steps,
)

_TYPES = {
    "f16": llama.GGML_TYPE_F16,
    "q8_0": llama.GGML_TYPE_Q8_0,
    "q4_0": llama.GGML_TYPE_Q4_0,
}
_BATCH = 512
_SEED_TOKENS = 512
_CELLS_ALIGNED = 256


class Decoder:
    """A model, its context, and one sequence that grows."""

    def __init__(self, request: Request, tokens: int) -> None:
        """Load the model and allocate a cache of `tokens` tokens at once, as llama.cpp does."""
        llama.llama_backend_init()
        begin_phase("load")
        loading = llama.llama_model_default_params()
        loading.use_extra_bufts = "mapped" not in request.options
        model = llama.llama_model_load_from_file(request.model.encode(), loading)
        if not model:
            raise RuntimeError("the model could not be loaded")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        begin_phase("allocate")
        wanted = llama.llama_context_default_params()
        wanted.n_ctx = -(-tokens // _CELLS_ALIGNED) * _CELLS_ALIGNED
        wanted.n_batch = wanted.n_ubatch = _BATCH
        wanted.n_threads, wanted.n_threads_batch = request.threads, request.prompt_threads
        wanted.type_k = wanted.type_v = _TYPES[request.cache]
        wanted.flash_attn_type = (
            llama.LLAMA_FLASH_ATTN_TYPE_DISABLED if "unfused" in request.options
            else llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        )  # fmt: skip
        self.context = llama.llama_init_from_model(model, wanted)
        if not self.context:
            raise RuntimeError("the context could not be allocated")
        self.token = 1

    def clear(self) -> None:
        """Forget the sequence."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def read(self, ids: list[int]) -> None:
        """Append tokens; `token` is then what comes next."""
        for start in range(0, len(ids), _BATCH):
            piece = ids[start : start + _BATCH]
            tokens = (llama.llama_token * len(piece))(*piece)
            failed = llama.llama_decode(self.context, llama.llama_batch_get_one(tokens, len(piece)))
            if failed:
                raise RuntimeError(f"llama_decode returned {failed}")
        logits = llama.llama_get_logits_ith(self.context, -1)
        self.token = int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())

    def step(self) -> None:
        """Decode one token."""
        self.read([self.token])

    def fill(self, tokens: int, scratch: Path, seed: int) -> None:
        """Fill the cache with copies of the keys and values of a short prefill.

        They go through a saved state, whose cells are repeated. Positions count on.
        """
        count = min(_SEED_TOKENS, tokens)
        self.read(random_ids(self._vocabulary, count, seed))
        short, long = scratch / "short.state", scratch / "long.state"
        nothing = (llama.llama_token * 1)()
        if not llama.llama_state_seq_save_file(self.context, str(short).encode(), 0, nothing, 0):
            raise RuntimeError("the state could not be saved")
        widen(short, long, tokens)
        self.clear()
        found = ctypes.c_size_t()
        loaded = llama.llama_state_seq_load_file(
            self.context, str(long).encode(), 0, nothing, 1, ctypes.byref(found)
        )
        if not loaded:
            raise RuntimeError("the widened state was refused")
        drop_page_cache(scratch)
        short.unlink()
        long.unlink()


def random_ids(vocabulary: int, tokens: int, seed: int) -> list[int]:
    """A prompt of random token ids."""
    return random.Random(seed).choices(range(vocabulary), k=tokens)


def speed(request: Request) -> dict[str, Any]:
    """Fill the cache and decode from it."""
    decoder = Decoder(request, request.context + request.steps + 64)
    load_peak = peak_bytes()
    reset_peak()
    begin_phase("fill")
    start = time.perf_counter()
    if request.prefill == "synthetic":
        decoder.fill(request.context, Path(request.scratch), request.seed)
    else:
        decoder.read(random_ids(decoder._vocabulary, request.context, request.seed))
    fill = {"fill_s": time.perf_counter() - start, "fill_peak_bytes": peak_bytes()}
    return {
        **time_steps(decoder.step, request), **fill, "load_peak_bytes": load_peak,
        "prefill": request.prefill, "note": llama.llama_print_system_info().decode().strip(),
    }  # fmt: skip


def prompt(request: Request) -> dict[str, Any]:
    """Read a prompt, or two chunks of it."""
    decoder = Decoder(request, request.context + 64)

    @contextmanager
    def opened(before: int) -> Iterator[Callable[[int], None]]:
        decoder.clear()
        if before:
            decoder.fill(before, Path(request.scratch), request.seed)
        yield lambda tokens: decoder.read(random_ids(decoder._vocabulary, tokens, request.seed))

    return time_prompt(opened, request)


def recall(request: Request) -> dict[str, Any]:
    """Answer the samples."""
    longest = max(
        len(sample["prompt_ids"]) + sample["max_new_tokens"] for sample in request.read_samples()
    )
    decoder = Decoder(request, longest)

    def answer(sample: dict[str, Any]) -> list[int]:
        decoder.clear()
        decoder.read(sample["prompt_ids"])
        found = [decoder.token]
        while found[-1] != sample["eos_id"] and len(found) < sample["max_new_tokens"]:
            decoder.step()
            found.append(decoder.token)
        return found

    return answer_samples(answer, request)


if __name__ == "__main__":
    serve(speed, recall, prompt)
