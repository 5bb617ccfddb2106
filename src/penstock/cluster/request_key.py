"""request_key(): what a request is routed by, a document or the beginning of a conversation."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any
from urllib.parse import parse_qs, unquote

DOCUMENTS = "/v1/documents"
_HEAD_CHARS = 256
"""Of a prompt: its later turns have the same."""
_TEXTS = ("messages", "input", "prompt")


def request_key(path: str, query: str, body: bytes) -> str | None:
    """The key of a request; requests of one key want the same stored KV.

    A document counts by its name, and a `prompt_cache_key` as one. A conversation counts by what
    stands before its first answer, which every later turn repeats. Each is apart by `cache_salt`.

    Returns:
        None: it may go anywhere.
    """
    said = _object(body)
    salt = str(said.get("cache_salt") or "".join(parse_qs(query).get("cache_salt", [])))
    if path == DOCUMENTS or path.startswith(DOCUMENTS + "/"):
        name = unquote(path[len(DOCUMENTS) + 1 :]) or said.get("name")
        return _key("document", salt, name) if name else None
    name = said.get("document") or said.get("prompt_cache_key")
    if name:
        return _key("document", salt, name)
    texts = next((said[each] for each in _TEXTS if said.get(each)), None)
    if texts is None:
        return None
    first = [said.get("system"), said.get("instructions"), _beginning(texts)]
    return _key("conversation", salt, first)


def _beginning(texts: Any) -> Any:
    if isinstance(texts, str):
        return texts[:_HEAD_CHARS]
    if not isinstance(texts, list):
        return None
    said: list[Any] = []
    for each in texts:
        if isinstance(each, Mapping):
            if each.get("role") == "assistant":
                break
            said.append([each.get("role"), each.get("content")])
            if each.get("role") == "user":
                break
        else:  # token ids, or several prompts
            return [part[:_HEAD_CHARS] if isinstance(part, str) else part for part in texts[:64]]
    return said


def _object(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _key(kind: str, salt: str, what: Any) -> str:
    text = json.dumps([kind, salt, what], sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()
