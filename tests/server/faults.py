"""Servers that are killed in every state: what they promised is there when they come again.

    python -m tests.server.faults --times 500 --resume --output FILE

Not part of the suite. The exit status is 1 where a promise was broken. --full-disk takes a small
file system, such as `mount -t tmpfs -o size=12m tmpfs DIR` makes.
"""

import argparse
import contextlib
import json
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.core.byte_size import format_bytes
from penstock.core.errors import PenstockError
from penstock.evaluate.entry import run_program
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result, public_arguments, without_path
from penstock.evaluate.sitting import Sitting, say, sit
from tests.server.promises import PROFILES, QUESTION, SALTS, Promises, Talk, text_of
from tests.server.server_process import STAGES, ServerProcess, prepare

Row = dict[str, Any]
BLOCK = 25
"""Kills over one folder."""
FULL_FILE = 200_000
"""Bytes of a file where no file system is given that may be filled."""


class Faults(Promises):
    """States that a server is killed in, and what else goes wrong."""

    start_s = 1.0
    """How long a start takes."""

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
            body = self.body([{"role": "user", "content": self.text(200, 800)}], max_tokens=200)
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
        self.body([], max_tokens=300)  # what follows the document is stored as well
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

    def aside(self, do: Callable[[], None]) -> None:
        """Do it in a thread."""
        self.threads.append(threading.Thread(target=do, daemon=True))
        self.threads[-1].start()

    # A life -----------------------------------------------------------------------------------

    def round(self, number: int) -> None:
        """A server comes, shows what was promised, promises more, and is killed."""
        states = (
            self.starting, self.prefilling, self.streaming, self.decoding, self.queueing,
            self.storing, self.adding, self.deleting, self.ending, self.asking,
        )  # fmt: skip
        state = states[number % len(states)]
        self.counts[state.__name__] += 1
        self.settled = self.stored
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

    def full_disk(self, small: Path | None) -> None:
        """A folder where little fits: answers go on, what is promised stays.

        Args:
            small: a file system; None: a limit of file sizes stands in for a full one.
        """
        with (
            tempfile.TemporaryDirectory(dir=small or self.folder) as name,
            self.start("--max-disk", "1GiB", at=Path(name), file_limit=0 if small else FULL_FILE
                       ) as server,
            server.ready().client() as client,
        ):  # fmt: skip
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
                self.counts["full disk: deleted"] += 1
            self.check("idle on a full disk", server.is_idle())
            said = server.errors()
            is_calm = "Traceback" not in said and "unexpected" not in said
            self.check("nothing unexpected on a full disk", is_calm, said[-600:])
            self.counts["full disk: not stored"] += said.count("was not stored")
            server.kill()

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
            is_done = server.is_idle()
            beside_s = others()
            for each in slow:
                each.close()
            after_s = others()
            slowest_s = 3 * max(before_s, after_s) + 0.1
            self.check("slow readers end", is_done)
            self.check("others are as fast", beside_s < slowest_s, (before_s, beside_s, after_s))
            grown = max(held) - before["memory_mib"]
            self.check("slow readers take no memory", grown < 40, grown)
            return {"others_before_s": before_s, "others_beside_s": beside_s,
                    "others_after_s": after_s, "grown_mib": grown}  # fmt: skip

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
                server.is_idle()  # else it waits for what the last one stores
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


class Kills:
    """Blocks of kills, under one profile after the other; a `Work`."""

    def __init__(self, args: argparse.Namespace, commit: str) -> None:
        self._args, self._commit = args, commit
        self._rows: dict[str, Row] = {
            profile: {"kills": 0, "wrong": [], "counts": {}, "samples": [], "blocks": []}
            for profile in PROFILES
        }

    def take_up(self, former: Result) -> None:
        """Go on behind its last kill."""
        self._rows = {profile: former.figures[profile] for profile in PROFILES}

    def figures(self) -> dict[str, Any]:
        """By profile."""
        return dict(self._rows)

    @property
    def wrong(self) -> list[str]:
        """Promises that were broken."""
        return [each for row in self._rows.values() for each in row["wrong"]]

    @property
    def kills(self) -> int:
        """So far."""
        return sum(row["kills"] for row in self._rows.values())

    def report(self) -> str:
        """What was done and found."""
        lines = [f"{profile}: {row['kills']} kills, {row['counts']}"
                 for profile, row in self._rows.items()]  # fmt: skip
        return "\n".join([*lines, *(f"WRONG {each}" for each in self.wrong)])

    def run(self, sitting: Sitting) -> None:
        """Kill as often as was asked."""
        while self.kills < self._args.times and not sitting.time_is_up():
            profile = min(PROFILES, key=lambda each: self._rows[each]["kills"])
            with self._faults(profile) as faults:
                self._block(faults, sitting)
        for profile, row in self._rows.items():
            for what in ("slow_readers", "timing"):
                if what == "slow_readers" and profile != "in memory":
                    continue  # their caches would wait for each other's memory
                if what in row or sitting.time_is_up():
                    continue
                with self._faults(profile) as faults:
                    row[what] = getattr(faults, what)()
                    self._keep(faults, sitting)

    @contextlib.contextmanager
    def _faults(self, profile: str) -> Iterator[Faults]:
        seed = f"{self._args.seed}-{self._rows[profile]['kills']}"
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
            contextlib.closing(Faults(seed, Path(name), profile)) as faults,
        ):
            yield faults

    def _keep(self, faults: Faults, sitting: Sitting) -> None:
        row = self._rows[faults.profile]
        row["counts"] = dict(Counter(row["counts"]) + faults.taken())
        row["wrong"] += faults.wrong
        row["samples"] += faults.rows
        faults.wrong, faults.rows = [], []
        sitting.keep(self.figures())
        say(f"{faults.profile}: {row['kills']} kills, {len(self.wrong)} wrong, "
            f"{json.dumps(row['samples'][-1:])}")  # fmt: skip

    def _block(self, faults: Faults, sitting: Sitting) -> None:
        """Kills over one folder; a run that goes on begins with a new one."""
        row = self._rows[faults.profile]
        row["blocks"].append({"commit": self._commit, "kills": 0})
        while row["blocks"][-1]["kills"] < BLOCK:
            if self.kills >= self._args.times or sitting.time_is_up():
                break
            number = row["kills"]
            faults.round(number)
            row["kills"] += 1
            row["blocks"][-1]["kills"] += 1
            if number % 10 == 9:
                faults.damage()
            if number % 25 == 24:
                faults.full_disk(self._args.full_disk)
            self._keep(faults, sitting)


def run(arguments: Sequence[str]) -> None:
    """Run it.

    Raises:
        PenstockError: bad arguments, or promises that were broken.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.server.faults", description=__doc__)
    parser.add_argument("--times", type=int, default=500)
    parser.add_argument(
        "--full-disk", type=Path, metavar="DIR",
        help="a small file system, to be filled; default: a limit of file sizes",
    )  # fmt: skip
    args = read_options(parser, arguments)
    full = f"no file above {FULL_FILE} bytes"
    if args.full_disk is not None:
        arguments = without_path(arguments, "--full-disk", str(args.full_disk))
        full = f"a file system of {format_bytes(shutil.disk_usage(args.full_disk).total)}"
    settings = {"times": args.times, "full_disk": full}
    result = Result.begin("server-faults", [], settings, seed=args.seed)
    result.command = f"python -m tests.server.faults {public_arguments(arguments)}"
    prepare()
    kills = Kills(args, result.commit)
    sit(Sitting(result, args), kills, args)
    if kills.wrong:
        raise PenstockError(f"{len(kills.wrong)} promises were broken")


if __name__ == "__main__":
    run_program(run)
