"""Promises: what a server over one folder has promised to clients, and what it is checked by."""

import json
import random
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.testing.tiny_chat import tiny_chat_model
from tests.server.server_process import PATIENCE_S, ServerProcess

SALTS = ("", "ann", "bob")
MOST_TALKS, MOST_TURNS, MOST_DOCUMENTS = 4, 4, 3
MAX_DISK = 48 << 20
DISK_SLACK = 8 << 20
"""What is being stored comes on top."""
BYTES_PER_TOKEN, BYTES_PER_TALK = 560, 8192
"""On the disk, at most: 512 of KV, the token, the unit's seal; a manifest, the rest of a unit."""
FILES_PER_DOCUMENT = 9
"""Descriptors of one that was asked and stays open: its folder, lock, seals, and six files."""
WORDS = ("harbour", "gate", "lantern", "ship", "rope", "tide", "letter", "stone", "bell", "west")
QUESTION = "\nWhat is it?"
OPTIONS = (
    "--memory", "64MiB", "--adapter", "none", "--max-new-tokens", "16", "--grace", "2", "--chunk",
    "128", "--max-disk", str(MAX_DISK),
)  # fmt: skip
PROFILES = {"in memory": ("--policy", "full"), "in tiers": ("--memory", "3MiB", "--exact")}
"""Settings under which a stored beginning and a prompt that is read give the same tokens."""
Turn = dict[str, str]


@dataclass(eq=False)
class Talk:
    """A conversation that the server has promised to keep."""

    salt: str
    turns: list[Turn]
    cached: int
    """Tokens of it that are on the disk, at least."""
    since: int = 0
    """What of `Promises.stored` is surely older than its last use."""


class Promises:
    """Servers over one folder, and what they have promised.

    A conversation is kept until more than `MAX_DISK` was stored or used after its last use, which
    is counted here by what requests can have stored at most.
    """

    def __init__(self, seed: str, folder: Path, profile: str) -> None:
        self.random = random.Random(f"{seed}-{profile}")
        self.folder, self.model, self.profile = folder, folder / "model", profile
        self.talks: list[Talk] = []
        self.documents: dict[tuple[str, str], str] = {}
        """Texts by name and salt."""
        self.perhaps: set[tuple[str, str]] = set()
        """Documents whose adding or deleting was cut off: there or not."""
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.rows: list[dict[str, float]] = []
        self.made = 0
        self.threads: list[threading.Thread] = []
        """Clients that go on beside."""
        self.stored = self.settled = 0
        """Bytes of conversations so far, and those of them that were stored when it was idle."""
        self.known: dict[str, str] = {}
        tiny_chat_model(positions=8192, folder=self.model)
        self.reference = ServerProcess(
            str(self.model), "--policy", "full", *OPTIONS, "--library", str(folder / "none")
        ).ready()

    def close(self) -> None:
        """End the server that says what an answer should be."""
        self.reference.__exit__()

    def start(self, *more: str, at: Path | None = None, file_limit: int = 0) -> ServerProcess:
        """A server over what is stored."""
        place = at or self.folder / "kept"
        place.mkdir(exist_ok=True)
        return ServerProcess(
            str(self.model), *OPTIONS, *PROFILES[self.profile], "--library", str(place / "library"),
            "--sessions", str(place / "sessions"), "--disk", str(place), *more,
            file_limit=file_limit,
        )  # fmt: skip

    # What is asked ----------------------------------------------------------------------------

    def text(self, least: int = 200, most: int = 1600) -> str:
        """A text of so many letters; a letter is a token."""
        self.made += 1
        count = self.random.randint(least, most) // 6
        return f"{self.made} " + " ".join(self.random.choices(WORDS, k=count))

    def body(self, turns: list[Turn], salt: str = "", **more: Any) -> dict[str, Any]:
        """Of a chat, which may be stored."""
        self.stored += size_of(turns, more.get("max_tokens", 8))
        return {
            "messages": turns, "cache_salt": salt, "temperature": 0, "max_tokens": 8,
            "ignore_eos": True, **more,
        }  # fmt: skip

    def expected(self, path: str, body: dict[str, Any]) -> str:
        """The answer of a server that has stored nothing."""
        asked = {name: each for name, each in body.items() if name != "cache_salt"}
        key = json.dumps(asked, sort_keys=True)
        if key not in self.known:
            with self.reference.client() as client:
                self.known[key] = text_of(client.post(path, json=asked).json())
        return self.known[key]

    def taken(self) -> Counter[str]:
        """What was counted since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts

    def check(self, what: str, is_so: bool, more: object = "") -> None:
        """Note a promise that was broken."""
        self.counts["checks"] += 1
        if not is_so:
            self.wrong.append(f"{what} {more}"[:600])
            print("WRONG", self.wrong[-1], flush=True)

    def ask(self, server: ServerProcess, talk: Talk, what: str) -> None:
        """A further question to a conversation, which stays as it was promised."""
        body = self.body([*talk.turns, {"role": "user", "content": "And then?"}], talk.salt)
        with server.client() as client:
            answer = client.post("/v1/chat/completions", json=body)
        self.check(f"{what}: a status", answer.status_code == 200, answer.text)
        if answer.status_code == 200:
            said = answer.json()
            cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
            later = self.stored - talk.since + size_of(talk.turns, 0)
            if later <= MAX_DISK:
                self.check(f"{what}: cached", cached >= talk.cached, f"{cached} < {talk.cached}")
            self.counts["kept" if cached >= talk.cached else "gone as it may"] += 1
            talk.since = self.settled
            self.check(f"{what}: the answer", text_of(said) == self.expected(
                "/v1/chat/completions", body), said)  # fmt: skip

    def ask_document(self, server: ServerProcess, name: str, salt: str, what: str) -> None:
        """A question to a document."""
        text = self.documents[name, salt]
        body = {"prompt": QUESTION, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        with server.client() as client:
            asked = {**body, "document": name, "cache_salt": salt}
            answer = client.post("/v1/completions", json=asked)
        self.check(f"{what}: a status", answer.status_code == 200, answer.text)
        if answer.status_code == 200:
            whole = self.expected("/v1/completions", {**body, "prompt": text + QUESTION})
            self.check(f"{what}: the answer", text_of(answer.json()) == whole, answer.text)

    # What is promised -------------------------------------------------------------------------

    def talk(self, server: ServerProcess) -> Talk:
        """A conversation, or one more turn of one, answered and stored."""
        shorter = [each for each in self.talks if len(each.turns) < 2 * MOST_TURNS]
        if shorter and self.random.random() < 0.4:
            talk = self.random.choice(shorter)
        else:
            talk = Talk(self.random.choice(SALTS), [], 0)
        turns = [*talk.turns, {"role": "user", "content": self.text()}]
        with server.client() as client:
            said = client.post("/v1/chat/completions", json=self.body(turns, talk.salt)).json()
            if talk in self.talks:
                self.talks.remove(talk)
            talk.turns = [*turns, {"role": "assistant", "content": text_of(said)}]
            # Whoever asks under the same salt waits for what is being stored.
            client.post("/v1/completions", json={
                "prompt": "a", "max_tokens": 1, "cache_salt": talk.salt})  # fmt: skip
            talk.cached, talk.since = said["usage"]["prompt_tokens"], self.settled
        self.talks = [*self.talks, talk][-MOST_TALKS:]
        return talk

    def add(self, server: ServerProcess) -> None:
        """A document; the oldest goes."""
        while len(self.documents) >= MOST_DOCUMENTS:
            self.delete(server)
        with server.client() as client:
            name, salt, text = f"d{self.made}", self.random.choice(SALTS), self.text()
            body = {"name": name, "text": text, "cache_salt": salt}
            answer = client.post("/v1/documents", json=body)
        self.check("add", answer.status_code == 201, answer.text)
        self.documents[name, salt] = text

    def delete(self, server: ServerProcess) -> None:
        """The oldest document."""
        name, salt = next(iter(self.documents))
        with server.client() as client:
            gone = client.delete(f"/v1/documents/{name}", params={"cache_salt": salt})
        self.check("delete", gone.status_code == 200, gone.text)
        del self.documents[name, salt]

    def verify(self, server: ServerProcess) -> None:
        """All that was promised is there, and no more than that of documents."""
        with server.client() as client:
            for salt in SALTS:
                listed = client.get("/v1/documents", params={"cache_salt": salt}).json()["data"]
                found = {(each["id"], salt): each["status"] for each in listed}
                if salt == "":  # which sees the names of others with their digests
                    found = {key: state for key, state in found.items() if "--" not in key[0]}
                for key in [key for key in found if key in self.perhaps]:
                    gone = client.delete(f"/v1/documents/{key[0]}", params={"cache_salt": salt})
                    self.check("delete what was cut off", gone.status_code == 200, gone.text)
                    del found[key]
                promised = {key for key in self.documents if key[1] == salt}
                self.check("documents listed", set(found) == promised, (found, promised))
                self.check("documents ready", {*found.values()} <= {"ready"}, found)
        self.perhaps.clear()
        for name, salt in self.documents:
            self.ask_document(server, name, salt, f"the document {name}")
        for talk in self.talks:
            self.ask(server, talk, "a conversation")
        if self.talks:  # another user's
            talk = self.random.choice(self.talks)
            self.made += 1
            body = self.body(talk.turns, f"eve{self.made}")  # whose own answers are stored too
            with server.client() as client:
                said = client.post("/v1/chat/completions", json=body).json()
            cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.check("eve finds nothing", cached < 64, cached)
        self.settle(server)

    def settle(self, server: ServerProcess) -> None:
        """Let all requests end, and what they store be stored."""
        for each in self.threads:
            each.join(PATIENCE_S)
        self.threads.clear()
        before = self.stored
        self.check("idle", server.is_idle(), "requests or memory are left")
        self.settled = before

    def sample(self, server: ServerProcess) -> None:
        """What the server and the disk hold."""
        place = self.folder / "kept"
        files = [each for each in place.rglob("*") if each.is_file()]
        kept = sum(each.stat().st_size for each in files if "sessions" in each.parts)
        self.check("the disk's bound", kept <= MAX_DISK + DISK_SLACK, kept)
        strays = [each.name for each in place.iterdir() if each.name not in (
            "library", "sessions", "sessions.key")]  # fmt: skip
        self.check("no files are left", not strays, strays)
        disk = sum(each.stat().st_blocks * 512 for each in files)
        with server.client() as client:  # the next request lets the last ones' files go
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        server.await_closing()
        most = server.descriptors + FILES_PER_DOCUMENT * len(self.documents)
        held = server.resources()
        self.check("descriptors", held["descriptors"] <= most, (held, most))
        self.rows.append({**held, "disk_mib": disk / 2**20})


def size_of(turns: list[Turn], new_tokens: int) -> int:
    """Bytes of a conversation on the disk, at most; a letter is a token, and so are marks."""
    letters = sum(len(each["content"]) + 40 for each in turns)
    return BYTES_PER_TOKEN * (letters + new_tokens) + BYTES_PER_TALK


def text_of(said: Any) -> str:
    """The text of a whole answer."""
    if "choices" not in said:
        return f"no answer: {said}"
    [choice, *_] = said["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])
