"""Continuous batching of transformers itself: the whole cache in pages of the device's memory."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.errors import PenstockError
from penstock.generation.serving.request import Request
from penstock.models.loader import CausalLM

Row = dict[str, Any]


def seen_from_outside(
    seconds: float, answer: int, first_s: Sequence[float], between_s: NDArray[np.float64]
) -> Row:
    """What clients of another program saw.

    Args:
        seconds: that all answers took together.
        answer: tokens of each.
        first_s: until each client's first token.
        between_s: between two tokens, of all clients.
    """
    new = answer * len(first_s)
    return {
        "seconds": seconds, "new_tokens": new, "tokens_per_s": new / seconds,
        "first_token_p50_s": float(np.percentile(first_s, 50)),
        "first_token_p99_s": float(np.percentile(first_s, 99)),
        "between_p50_s": float(np.percentile(between_s, 50)),
        "between_p99_s": float(np.percentile(between_s, 99)),
    }  # fmt: skip


def paged(model: CausalLM, requests: Sequence[Request], answer: int) -> Row:
    """All requests asked at once.

    Pages take what the model leaves of the device's memory, as they do by default. Making them,
    and warming up, is not timed.

    Args:
        requests: whose prompts are token ids.
        answer: tokens of each answer.

    Raises:
        PenstockError: a request was not answered in full.
    """
    asked = copy.deepcopy(model.generation_config)
    asked.update(max_new_tokens=answer, do_sample=False, eos_token_id=-1)
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found: Any = model.generate_batch(
        inputs=[list(each.prompt) for each in requests], generation_config=asked,
        record_timestamps=True,
    )  # fmt: skip
    outputs = list(found.values())
    if len(outputs) != len(requests) or any(len(o.generated_tokens) != answer for o in outputs):
        raise PenstockError("transformers has not answered every request in full")
    started_s = min(each.created_time for each in outputs)
    seconds = max(each.timestamps[-1] for each in outputs) - started_s
    first = [each.timestamps[0] - each.created_time for each in outputs]
    between = np.concatenate([np.diff(each.timestamps) for each in outputs])
    return seen_from_outside(seconds, answer, first, between) | {
        "peak_bytes": torch.cuda.max_memory_allocated() if model.device.type == "cuda" else 0,
        "attention": model.config._attn_implementation,
    }  # fmt: skip
