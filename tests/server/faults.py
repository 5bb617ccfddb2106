"""Servers that are killed in every state: what they promised is there when they come again.

    python -m tests.server.faults --times 500 --out benchmarks/results/server-faults.json

Not part of the suite. The exit status is 1 where a promise was broken.
"""

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.evaluate.result import Result
from penstock.testing.tiny_chat import tiny_chat_model
from tests.server.server_process import STAGES, ServerProcess, prepare

SALTS = ("", "ann", "bob")
MOST_TALKS, MOST_DOCUMENTS = 4, 3
MAX_DISK = 24 << 20
DISK_SLACK = 8 << 20
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


class Faults:
    """Servers over one folder, and what they have promised."""

    def __init__(self, seed: int, folder: Path, profile: str) -> None:
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
        self.start_s = 1.0
        self.made = 0
        self.known: dict[str, str] = {}
        tiny_chat_model(positions=8192, folder=self.model)
        self.reference = ServerProcess(
            str(self.model), "--policy", "full", *OPTIONS, "--library", str(folder / "none")
        ).ready()

    def close(self) -> None:
        """End the server that is asked for what an answer should be."""
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

    @staticmethod
    def body(turns: list[Turn], salt: str = "", **more: Any) -> dict[str, Any]:
        """Of a chat."""
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
            self.check(f"{what}: cached", cached >= talk.cached, f"{cached} < {talk.cached}")
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
        if self.talks and self.random.random() < 0.4:
            talk = self.random.choice(self.talks)
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
            talk.cached = said["usage"]["prompt_tokens"]
        self.talks = [*self.talks, talk][-MOST_TALKS:]
        return talk

    def add(self, server: ServerProcess) -> None:
        """A document; the oldest goes."""
        with server.client() as client:
            while len(self.documents) >= MOST_DOCUMENTS:
                name, salt = next(iter(self.documents))
                gone = client.delete(f"/v1/documents/{name}", params={"cache_salt": salt})
                self.check("delete", gone.status_code == 200, gone.text)
                del self.documents[name, salt]
            name, salt, text = f"d{self.made}", self.random.choice(SALTS), self.text()
            body = {"name": name, "text": text, "cache_salt": salt}
            answer = client.post("/v1/documents", json=body)
        self.check("add", answer.status_code == 201, answer.text)
        self.documents[name, salt] = text

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
        self.check("idle", server.is_idle(), "requests or memory are left")

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
        self.rows.append({**server.resources(), "disk_mib": disk / 2**20})

    # States -----------------------------------------------------------------------------------

    def starting(self, server: ServerProcess) -> None:
        """Killed by `round` before it listens."""

    def prefilling(self, server: ServerProcess) -> None:
        """A prompt is being read."""
        turns = [{"role": "user", "content": self.text(2000, 6000)}]
        self.until(server, self.body(turns, return_progress=True), 0, 30)

    def streaming(self, server: ServerProcess) -> None:
        """An answer is on its way."""
        turns = [{"role": "user", "content": self.text()}]
        self.until(server, self.body(turns, max_tokens=400), 1, 100)

    def decoding(self, server: ServerProcess) -> None:
        """Answers that are sent as a whole are being made."""
        self.aside(lambda: self.post(server, "/v1/chat/completions", self.body(
            [{"role": "user", "content": self.text()}], max_tokens=600, n=2)))  # fmt: skip
        time.sleep(self.random.uniform(0, 0.5))

    def queueing(self, server: ServerProcess) -> None:
        """Many requests wait."""
        for _ in range(14):
            body = self.body([{"role": "user", "content": self.text()}], max_tokens=300)
            self.aside(partial(self.post, server, "/v1/chat/completions", body))
        time.sleep(self.random.uniform(0, 0.4))

    def storing(self, server: ServerProcess) -> None:
        """A conversation, or its next turn, is on its way to the disk."""
        talk = self.random.choice(self.talks) if self.talks else Talk("", [], 0)
        fresh = self.random.random() < 0.5
        turns = [] if fresh else talk.turns
        body = self.body([*turns, {"role": "user", "content": self.text(400, 3000)}], talk.salt)
        self.post(server, "/v1/chat/completions", body)
        time.sleep(self.random.uniform(0, 0.03))

    def adding(self, server: ServerProcess) -> None:
        """A document is being read or stored."""
        name, salt = f"d{self.made}", self.random.choice(SALTS)
        self.perhaps.add((name, salt))
        body = {"name": name, "text": self.text(500, 4000), "cache_salt": salt}
        self.aside(lambda: self.post(server, "/v1/documents", body))
        time.sleep(self.random.uniform(0, 0.6))

    def deleting(self, server: ServerProcess) -> None:
        """A document is being removed."""
        if not self.documents:
            self.add(server)
        name, salt = self.random.choice([*self.documents])
        del self.documents[name, salt]
        self.perhaps.add((name, salt))
        path = f"/v1/documents/{name}?cache_salt={salt}"
        self.aside(lambda: self.post(server, path, None, "DELETE"))
        time.sleep(self.random.uniform(0, 0.02))

    def ending(self, server: ServerProcess) -> None:
        """It was told to end, while it answers."""
        self.decoding(server)
        server.process.send_signal(self.random.choice((signal.SIGTERM, signal.SIGHUP)))
        time.sleep(self.random.uniform(0, 0.6))

    def asking(self, server: ServerProcess) -> None:
        """A document is being asked."""
        if not self.documents:
            self.add(server)
        name, salt = self.random.choice([*self.documents])
        body = {"prompt": QUESTION, "document": name, "cache_salt": salt, "max_tokens": 300,
                "ignore_eos": True}  # fmt: skip
        self.aside(lambda: self.post(server, "/v1/completions", body))
        time.sleep(self.random.uniform(0, 0.3))

    def until(self, server: ServerProcess, body: dict[str, Any], least: int, most: int) -> None:
        """Stream as many frames."""
        wanted = self.random.randint(least, most)
        for number, _ in enumerate(server.stream("/v1/chat/completions", body)):
            if number >= wanted:
                self.counts["in the state"] += 1
                server.kill()
                return

    def post(self, server: ServerProcess, path: str, body: Any, method: str = "POST") -> None:
        """Ask something that may be cut off."""
        with contextlib.suppress(OSError, Exception), server.client() as client:
            client.request(method, path, json=body)

    @staticmethod
    def aside(do: Callable[[], None]) -> None:
        """Do it in a thread."""
        threading.Thread(target=do, daemon=True).start()

    # A life -----------------------------------------------------------------------------------

    def round(self, number: int) -> None:
        """A server comes, shows what was promised, promises more, and is killed."""
        states = (
            self.starting, self.prefilling, self.streaming, self.decoding, self.queueing,
            self.storing, self.adding, self.deleting, self.ending, self.asking,
        )  # fmt: skip
        state = states[number % len(states)]
        self.counts[state.__name__] += 1
        with self.start() as server:
            if state == self.starting:
                time.sleep(self.random.uniform(0, 1.2 * self.start_s))
                server.kill()
                return
            server.ready()
            self.start_s = 0.8 * self.start_s + 0.2 * (time.monotonic() - server.began_s)
            self.verify(server)
            self.sample(server)
            if self.random.random() < 0.7:
                self.talk(server)
            if self.random.random() < 0.3:
                self.add(server)
            for stage in self.random.sample(STAGES, 2):
                self.counts[f"gone {stage}"] += 1
                body = self.body([{"role": "user", "content": self.text()}], stream=True,
                                 max_tokens=200)  # fmt: skip
                server.vanish(server.request("/v1/chat/completions", body), stage)
            state(server)
            server.kill()
            said = server.errors()
            self.check("nothing unexpected", "Traceback" not in said and "unexpected" not in said,
                       said[-600:])  # fmt: skip

    def damage(self) -> None:
        """A stored conversation is damaged; its answers stay what they are, and it goes on."""
        with self.start() as server:
            server.ready()
            talk = self.talk(server)
            server.process.send_signal(signal.SIGTERM)
            self.check("it ends", server.process.wait() == 0, server.errors())
            self.check("it says why", "ended by SIGTERM" in server.errors(), server.errors())
        folders = [*(self.folder / "kept" / "sessions").iterdir()]
        # The one just stored.
        folder = max(folders, key=lambda each: max(f.stat().st_mtime for f in each.iterdir()))
        kinds: dict[str, list[Path]] = {}
        for each in folder.iterdir():
            kinds.setdefault(each.name.partition("-")[0], []).append(each)
        kind = self.random.choice(sorted(kinds))
        file = self.random.choice(sorted(kinds[kind]))
        size = file.stat().st_size
        how = self.random.choice(("first", "middle", "last", "short", "empty", "gone"))
        with open(file, "r+b") as opened:
            at = {"first": 0, "middle": size // 2, "last": max(0, size - 1)}.get(how)
            if at is not None and size:
                opened.seek(at)
                found = opened.read(1)
                opened.seek(at)
                opened.write(bytes([found[0] ^ 0x41]))
            elif how in ("short", "empty"):
                opened.truncate(0 if how == "empty" else max(0, size - 700))
        if how == "gone":
            file.unlink()
        self.counts[f"damaged {kind}"] += 1
        self.talks.remove(talk)
        talk.cached = 0
        with self.start() as server:
            server.ready()
            for _ in range(2):
                self.ask(server, talk, f"damaged: {file.name} {how}")
            self.verify(server)

    def full_disk(self, place: Path) -> None:
        """A folder where little fits: answers go on, what is promised stays."""
        with self.start("--max-disk", "1GiB", at=place, file_limit=self.random.choice(
            (0, 200_000)
        )) as server, server.ready().client() as client:  # fmt: skip
            for number in range(4):
                turns = [{"role": "user", "content": self.text(2000, 5000)}]
                body = self.body(turns, f"full{number}")
                answer = client.post("/v1/chat/completions", json=body)
                fits = self.profile == "in memory"
                self.check("an answer on a full disk", answer.status_code == 200 or (
                    not fits and answer.status_code == 507), answer.text)  # fmt: skip
                if answer.status_code == 200:
                    self.check("the same answer", text_of(answer.json()) == self.expected(
                        "/v1/chat/completions", body))  # fmt: skip
                added = client.post("/v1/documents", json={
                    "name": f"f{self.made}", "text": self.text(2000, 4000)})  # fmt: skip
                self.counts[f"full disk: a document {added.status_code}"] += 1
                self.check("a document on a full disk", added.status_code in (201, 507), added.text)
            for each in client.get("/v1/documents").json()["data"]:
                gone = client.delete(f"/v1/documents/{each['id']}")
                self.check("deleting on a full disk", gone.status_code == 200, gone.text)
            self.check("idle", server.is_idle())
            server.kill()
        for each in place.rglob("*"):
            if each.is_file():
                each.unlink()

    def slow_readers(self) -> dict[str, float]:
        """Readers of a byte a second hold up no one, and grow nothing."""
        with self.start("--max-running", "16") as server:
            server.ready()
            body = self.body([{"role": "user", "content": self.text(300, 300)}])

            def others() -> float:
                took = []
                for _ in range(8):
                    began = time.monotonic()
                    self.post(server, "/v1/chat/completions", body)
                    took.append(time.monotonic() - began)
                return statistics.median(took)

            others()
            before_s, before = others(), server.resources()
            long = self.body([{"role": "user", "content": "a"}], stream=True, max_tokens=3000)
            raw = server.request("/v1/chat/completions", long)
            slow = [server.connect(receive_bytes=2048) for _ in range(8)]
            for each in slow:
                each.sendall(raw)
            held: list[float] = []
            for _ in range(15):
                time.sleep(1)
                for each in slow:
                    each.recv(1)
                held.append(server.resources()["memory_mib"])
            is_done = server.is_idle(120)
            after_s = others()
            for each in slow:
                each.close()
            self.check("slow readers end", is_done)
            self.check("others are as fast", after_s < 3 * before_s + 0.1, (before_s, after_s))
            grown = max(held) - before["memory_mib"]
            self.check("slow readers take no memory", grown < 40, grown)
            return {"others_before_s": before_s, "others_beside_s": after_s, "grown_mib": grown}

    def timing(self, pairs: int = 30, letters: int = 4000) -> dict[str, float]:
        """First tokens of what another salt has stored come no sooner than of what no one has."""
        # Else what others store puts the owner's out, which then takes its owner as long.
        with self.start("--max-disk", "1GiB") as server:
            server.ready()
            stored = [self.text(letters, letters) for _ in range(4)]
            for text in stored:
                self.post(server, "/v1/chat/completions", self.body(
                    [{"role": "user", "content": text}], "ann"))  # fmt: skip
            took: dict[str, list[float]] = {"own": [], "other": [], "none": []}

            def first(text: str, salt: str) -> float:
                began = time.monotonic()
                for _ in server.stream("/v1/chat/completions", self.body(
                    [{"role": "user", "content": text}], salt, max_tokens=1)):  # fmt: skip
                    pass  # the role comes before the prompt is read, the token at the end
                return time.monotonic() - began

            for number in range(pairs):
                text = self.random.choice(stored)
                fresh = f"{number + 100} {text.partition(' ')[2][::-1]}"[: len(text)]
                kinds = [("own", text, "ann"), ("other", text, f"eve{number}"),
                         ("none", fresh, f"eve{number}-")]  # fmt: skip
                self.random.shuffle(kinds)
                for kind, asked, salt in kinds:
                    took[kind].append(first(asked, salt))
        chance = by_chance(took["other"], took["none"], self.random)
        own = by_chance(took["own"], took["none"], self.random)
        self.check("the owner hears it", own < 0.01, own)  # else the other one could not
        self.check("no one hears by the time what another has", chance > 0.001, chance)
        return {f"{kind}_p50_s": statistics.median(each) for kind, each in took.items()} | {
            "chance_other_none": chance, "chance_own_none": own, "pairs": pairs,
        }  # fmt: skip


def by_chance(one: list[float], other: list[float], rng: random.Random, tries: int = 4000) -> float:
    """How often medians of shuffled values lie as far apart: small where the two differ."""
    far, all_values = abs(statistics.median(one) - statistics.median(other)), [*one, *other]
    found = 0
    for _ in range(tries):
        rng.shuffle(all_values)
        parts = all_values[: len(one)], all_values[len(one) :]
        found += abs(statistics.median(parts[0]) - statistics.median(parts[1])) >= far
    return (found + 1) / (tries + 1)


def text_of(said: Any) -> str:
    """The text of a whole answer."""
    if "choices" not in said:
        return f"no answer: {said}"
    [choice, *_] = said["choices"]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=600, help="stop then, and say the count")
    parser.add_argument("--full-disk", type=Path, help="a small file system that may be filled")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    prepare()
    result = Result.begin("server-faults", [], {"times": given.times}, seed=given.seed)
    result.command = f"python -m tests.server.faults --times {given.times} --seed {given.seed}"
    result.command += f" --minutes {given.minutes:g}"
    begun = time.monotonic()
    for number, profile in enumerate(PROFILES, 1):
        until = begun + given.minutes * 60 * number / len(PROFILES)
        _of_profile(given, profile, until, result)
    result.figures["seconds"] = time.monotonic() - begun
    if given.out is not None:
        result.save(given.out)
    rows = result.figures.values()
    wrong = [each for row in rows if isinstance(row, dict) for each in row["wrong"]]
    print(json.dumps({"figures": result.figures, "wrong": wrong}))
    return 1 if wrong else 0


def _of_profile(given: argparse.Namespace, profile: str, until: float, result: Result) -> None:
    """Half of the kills, under one profile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        faults = Faults(given.seed, Path(name), profile)
        row: dict[str, Any] = {"kills": 0, "wrong": faults.wrong}
        result.figures[profile] = row
        if profile == "in memory":  # else their caches wait for each other's memory
            row["slow_readers"] = faults.slow_readers()
        row["timing"] = faults.timing()
        print(profile, json.dumps(row), flush=True)
        for number in range(given.times // len(PROFILES)):
            if time.monotonic() > until:
                break
            faults.round(number)
            row["kills"] += 1
            if number % 10 == 9:
                faults.damage()
            if number % 25 == 24:
                faults.full_disk(given.full_disk or Path(name) / "full")
            if number % 20 == 19:
                print(row["kills"], json.dumps(faults.rows[-1]), flush=True)
        row |= {"counts": dict(faults.counts), "samples": faults.rows}
        faults.close()


if __name__ == "__main__":
    sys.exit(main())
