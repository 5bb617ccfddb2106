"""Requests of one document stay together, few move when a replica goes, busy ones spill."""

import json
from collections import Counter

import pytest

from penstock.cluster.affinity import Ring, route
from penstock.cluster.request_key import request_key
from penstock.core.errors import ConfigError

KEYS = [f"document-{each}" for each in range(3000)]


def test_a_replica_that_goes_moves_its_own_keys_alone() -> None:
    names = [f"replica-{each}" for each in range(10)]
    before, after = Ring(names), Ring(names[:-1])
    homes = [before.walk(key)[0] for key in KEYS]
    assert max(Counter(homes).values()) < 1.5 * len(KEYS) / len(names)
    for key, home in zip(KEYS, homes, strict=True):
        walk = before.walk(key)
        assert sorted(walk) == names
        # Whoever is next on the walk takes over, as a spilled request has it already.
        assert after.walk(key)[0] == (walk[1] if home == names[-1] else home)


def test_a_busy_home_spills_to_the_next_that_is_below_the_bound() -> None:
    walk = ["a", "b", "c"]
    assert not route(walk, {"a": 3, "b": 0, "c": 0}, least=4).is_spill
    spilled = route(walk, {"a": 4, "b": 1}, least=4)
    assert spilled.is_spill
    assert (spilled.replica, spilled.home) == ("b", "a")
    assert route(walk, {"a": 9, "b": 9, "c": 2}, least=4).replica == "c"
    # The bound follows the mean: where all are busy, affinity counts again.
    assert route(walk, {"a": 20, "b": 20, "c": 20}, least=4).replica == "a"
    for wrong in ({"least": 0}, {"least": 4, "factor": 0.5}):
        with pytest.raises(ConfigError):
            route(walk, {}, **wrong)
    with pytest.raises(ConfigError):
        route([], {}, least=4)


def chat(*texts: str, **more: object) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[each % 2], "content": text} for each, text in enumerate(texts)]
    return json.dumps({"messages": messages, **more}).encode()


def test_a_key_is_the_document_or_the_conversation_for_each_salt() -> None:
    path = "/v1/chat/completions"
    first = request_key(path, "", chat("Hello"))
    assert first is not None
    assert request_key(path, "", chat("Hello", "Yes?", "More")) == first
    assert request_key(path, "", chat("Hullo")) != first
    assert request_key(path, "", chat("Hello", cache_salt="s")) != first
    asked = request_key(path, "", chat("Hello", document="it"))
    added = json.dumps({"name": "it", "text": "..."}).encode()
    assert request_key("/v1/documents", "", added) == asked
    assert request_key("/v1/documents/it", "", b"") == asked
    assert request_key("/v1/documents/it", "cache_salt=s", b"") == request_key(
        path, "", chat("Hello", prompt_cache_key="it", cache_salt="s")
    )
    for anywhere in (b"", b"[1]", b"{", b"\xff", b"{}"):
        assert request_key("/v1/models", "", anywhere) is None
