"""`python -m research.replicas`: what its clients ask, and what they say of it. No server runs."""

import threading
from collections import Counter
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from research.replicas import program
from research.replicas.clients import Crowd, summed, talks_of

TEXTS = [f"It is document {each}. " * 40 for each in range(20)]


class Served:
    """Answers what it is asked, and loses or refuses some."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self._lock = threading.Lock()

    def ask(self, path: str, body: Any = None) -> tuple[int, Any, dict[str, str]]:
        with self._lock:
            self.asked.append(body)
            number = len(self.asked)
        if number == 3:
            return 503, {"error": {"code": "replica_lost", "message": "lost"}}, {}
        if number == 30:
            return 400, {"error": {"code": None, "message": "no"}}, {}
        tokens = 200 if len(body["messages"]) > 1 else 100
        usage = {
            "prompt_tokens": tokens + 9, "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": tokens},
        }  # fmt: skip
        said = {"choices": [{"message": {"content": "Yes."}}], "usage": usage}
        return 200, said, {"x-penstock-replica": "1", "x-penstock-spill": "0"}


def test_popular_documents_are_asked_more_and_alike_again() -> None:
    talks = talks_of(TEXTS, 300, 1.0, seed=0)
    assert talks == talks_of(TEXTS, 300, 1.0, seed=0)
    assert sum(len(each.questions) for each in talks) == 300
    counted = Counter(each.document for each in talks)
    assert counted[0] > 3 * counted[10]
    assert talks[0].questions[0][-400:] in TEXTS[talks[0].document]


def test_all_is_asked_and_what_was_lost_is_asked_again() -> None:
    served, talks = Served(), talks_of(TEXTS, 60, 1.0, seed=1)
    crowd, halves = Crowd(served, talks, answer=4), list[int]()
    seconds = crowd.run(4, lambda: halves.append(len(crowd.seen)))
    assert len(halves) == 1
    assert halves[0] >= 30
    said = summed(crowd.seen, seconds, [100] * len(TEXTS))
    assert said["lost"] == 1
    assert said["errors"] == ["no"]
    assert said["answered"] == said["spilled"] == said["questions"] - 1
    assert said["went_on"] == said["later_turns"] > 10
    assert len(served.asked) == said["questions"] + 1
    shown = program.table({
        "model": "m", "documents": 20, "chars": 9, "clients": 4, "replicas": 3,
        "rows": [{"way": "affine", **said, "document_queries": 60, "document_hits": 45}],
    })  # fmt: skip
    assert "75 %" in shown


def test_documents_differ_or_are_refused() -> None:
    assert len(set(program.texts_of("".join(TEXTS), 50, 300))) == 50
    with pytest.raises(ConfigError, match="give more --text"):
        program.texts_of("short", 5, 2)
    with pytest.raises(ConfigError):
        program.parse_arguments(["--clients", "0"])
