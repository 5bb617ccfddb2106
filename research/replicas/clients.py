"""Clients that talk about documents, some of which many ask for; what they saw."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

_TURNS = (1, 2, 3)
_TRIES = 20
_AGAIN_S = 0.5
LEAST_STORED = 64
"""Tokens behind a document from which on a conversation is stored."""
_QUOTED = 1200
"""Characters of a document in a question; recall's words are eight characters of source code."""
Row = dict[str, Any]


class Asked(Protocol):
    """What is asked; see `Served.ask`."""

    def ask(self, path: str, body: Any = None) -> tuple[int, Any, dict[str, str]]:
        """Status, answer and headers."""


@dataclass(frozen=True)
class Talk:
    """A conversation about a document."""

    document: int
    questions: tuple[str, ...]


def talks_of(texts: Sequence[str], questions: int, skew: float, seed: int) -> list[Talk]:
    """Conversations of one to three turns, so many questions in all.

    The document of rank r is asked with a probability in proportion to r**-skew (Zipf). A question
    quotes its document, so that what stands behind the document is long enough to be stored.
    """
    drawn, talks, left = random.Random(seed), list[Talk](), questions
    weights = list(accumulate((rank + 1) ** -skew for rank in range(len(texts))))
    while left:
        [document] = drawn.choices(range(len(texts)), cum_weights=weights)
        said = []
        for _ in range(min(left, drawn.choice(_TURNS))):
            at = drawn.randrange(max(1, len(texts[document]) - _QUOTED))
            said.append(f"What follows this, and why? {texts[document][at : at + _QUOTED]}")
        talks.append(Talk(document, tuple(said)))
        left -= len(said)
    return talks


@dataclass
class Crowd:
    """Clients that take conversations from one list, each the next when it has ended one."""

    served: Asked
    talks: Sequence[Talk]
    answer: int
    """Most tokens of an answer."""
    seen: list[Row] = field(default_factory=list)
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, clients: int, half_way: Callable[[], None] | None = None) -> float:
        """Ask everything, and return the seconds that it took.

        Args:
            half_way: called once, when half of the questions are answered.
        """
        total = sum(len(each.questions) for each in self.talks)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(clients)]
        start_s = time.perf_counter()
        for each in threads:
            each.start()
        while half_way is not None and any(each.is_alive() for each in threads):
            if len(self.seen) >= total // 2:
                half_way()
                break
            time.sleep(0.01)
        for each in threads:
            each.join()
        return time.perf_counter() - start_s

    def _work(self) -> None:
        while True:
            with self._lock:
                number = self._next
                self._next += 1
            if number >= len(self.talks):
                return
            self._talk(self.talks[number])

    def _talk(self, talk: Talk) -> None:
        messages: list[Row] = []
        for turn, question in enumerate(talk.questions):
            messages.append({"role": "user", "content": question})
            body = {
                "messages": messages, "document": f"d{talk.document}", "temperature": 0,
                "max_tokens": self.answer,
            }  # fmt: skip
            row = self._ask(body) | {"document": talk.document, "turn": turn}
            self.seen.append(row)
            if row["status"] != 200:
                return
            messages.append({"role": "assistant", "content": row.pop("content")})

    def _ask(self, body: Row) -> Row:
        """One question; asked again where its answer was lost with a replica."""
        lost = 0
        start_s = time.perf_counter()
        for _ in range(_TRIES):
            status, said, headers = self.served.ask("/v1/chat/completions", body)
            if status == 200 or said.get("error", {}).get("code") != "replica_lost":
                break
            lost += 1
            time.sleep(_AGAIN_S)
        row = {
            "status": status, "lost": lost, "began_s": start_s,
            "seconds": time.perf_counter() - start_s,
            "replica": headers.get("x-penstock-replica", ""),
            "spilled": "x-penstock-spill" in headers,
        }  # fmt: skip
        if status != 200:
            return row | {"why": said["error"]["message"]}
        usage = said["usage"]
        return row | {
            "content": said["choices"][0]["message"]["content"] or "",
            "cached": usage["prompt_tokens_details"]["cached_tokens"],
            "prompt": usage["prompt_tokens"], "new": usage["completion_tokens"],
        }  # fmt: skip


def summed(seen: Sequence[Row], seconds: float, tokens: Sequence[int]) -> Row:
    """What a crowd saw.

    Args:
        tokens: of each document.
    """
    good = [each for each in seen if each["status"] == 200]
    later = [each for each in good if each["turn"]]
    on = [each for each in later if each["cached"] >= tokens[each["document"]] + LEAST_STORED]
    waits = [each["seconds"] for each in good] or [0.0]
    return {
        "questions": len(seen), "answered": len(good), "seconds": seconds,
        "questions_per_s": len(good) / seconds, "tokens_per_s": sum(each["new"] for each in good)
        / seconds, "p50_s": float(np.percentile(waits, 50)),
        "p99_s": float(np.percentile(waits, 99)),
        "lost": sum(each["lost"] for each in seen),
        "spilled": sum(each["spilled"] for each in good),
        "later_turns": len(later), "went_on": len(on),
        "errors": sorted({each["why"] for each in seen if "why" in each}),
    }  # fmt: skip
