"""Parts that replies of several APIs share: usage, timings, logprobs, ids."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.generation.logprobs import Logprob, LogprobsOnePosition
from penstock.generation.serving.events import Finished, Prefill, Usage

_NEVER = -9999.0
"""In place of minus infinity, which JSON has no number for."""


def new_id(prefix: str) -> str:
    """A name that no other reply has."""
    return f"{prefix}{secrets.token_hex(16)}"


def usage_of(*usages: Usage) -> dict[str, Any]:
    """OpenAI's usage of one or several requests."""
    prompt = sum(each.prompt_tokens for each in usages)
    new = sum(each.new_tokens for each in usages)
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in usages)},
    }  # fmt: skip


def progress_of(progress: Prefill) -> dict[str, Any]:
    """llama.cpp's prompt_progress."""
    return {
        "total": progress.total, "cache": progress.cached, "processed": progress.processed,
        "time_ms": round(1000 * progress.time_s),
    }  # fmt: skip


def timings_of(end: Finished) -> dict[str, Any]:
    """llama.cpp's timings."""
    usage, times = end.usage, end.timings
    read, made = usage.prompt_tokens - usage.cached_tokens, usage.new_tokens
    return {
        "cache_n": usage.cached_tokens, "queue_ms": 1000 * times.queue_s,
        "prompt_n": read, "prompt_ms": 1000 * times.prefill_s,
        "prompt_per_token_ms": 1000 * times.prefill_s / max(1, read),
        "prompt_per_second": read / times.prefill_s if times.prefill_s > 0 else 0.0,
        "predicted_n": made, "predicted_ms": 1000 * times.decode_s,
        "predicted_per_token_ms": 1000 * times.decode_s / max(1, made),
        "predicted_per_second": made / times.decode_s if times.decode_s > 0 else 0.0,
    }  # fmt: skip


def stats_of(end: Finished) -> dict[str, Any] | None:
    """What Penstock's page shows of an answer: memory, reads, hits, stall."""
    run = end.run
    if run is None:
        return None
    decode, memory = run.stats.decode, run.memory
    return {
        "policy": run.policy, "exact": run.exact,
        "cache_bytes": memory.used_bytes, "cache_peak_bytes": memory.peak_bytes,
        "cache_limit_bytes": memory.limit_bytes, "full_cache_bytes": memory.full_cache_bytes,
        "read_bytes": run.stats.prefill.read_bytes + decode.read_bytes,
        "written_bytes": run.stats.prefill.written_bytes + decode.written_bytes,
        "decode_tokens": decode.tokens, "decode_read_bytes": decode.read_bytes,
        "decode_stall_s": decode.stall_s, "units_wanted": decode.units_wanted,
        "units_hit": decode.units_hit, "attended": end.attended,
    }  # fmt: skip


def chat_logprobs(positions: Sequence[LogprobsOnePosition], count: int) -> dict[str, Any]:
    """OpenAI's logprobs of a chat.

    Args:
        count: most probable tokens wanted; the one that was taken stands in front of them here.
    """
    content = []
    for position in positions:
        best = [each for each in position.values() if (each.rank or 0) <= count]
        content.append({
            **_one(next(iter(position.values()))),
            "top_logprobs": [_one(each) for each in sorted(best, key=lambda one: one.rank or 0)],
        })  # fmt: skip
    return {"content": content, "refusal": None}


def _one(token: Logprob) -> dict[str, Any]:
    text = token.decoded_token or ""
    return {"token": text, "logprob": finite(token.logprob), "bytes": list(text.encode())}


def finite(logprob: float) -> float:
    """A logarithm that JSON can hold."""
    return max(_NEVER, logprob)


def completion_logprobs(
    positions: Sequence[LogprobsOnePosition], begin: int
) -> Mapping[str, list[Any]]:
    """OpenAI's logprobs of a completion.

    Args:
        begin: characters of the answer in front.
    """
    found: dict[str, list[Any]] = {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
    }  # fmt: skip
    for position in positions:
        taken = next(iter(position.values()))
        text = taken.decoded_token or ""
        found["tokens"].append(text)
        found["token_logprobs"].append(finite(taken.logprob))
        found["top_logprobs"].append(
            {each.decoded_token or "": finite(each.logprob) for each in position.values()}
        )
        found["text_offset"].append(begin)
        begin += len(text)
    return found
