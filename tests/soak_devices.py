"""`python -m tests.soak_devices`: hosts that fail in the middle of an answer, by seeds.

Two device hosts are processes behind relays. Each trial lets a small model answer a prompt with its
cache on them; at a random moment, in the prompt's writes or in a step, one host fails. With one
copy the tokens are those of a local device, or the error is a typed one, within the deadline. With
two copies they are right. Then damaged frames are sent to one host, which must still answer.
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from penstock.core.errors import PenstockError, StorageError
from penstock.evaluate.entry import run_program
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result, public_arguments
from penstock.evaluate.sitting import closed, say
from penstock.methods.hillinfer.near_storage import protocol
from penstock.methods.hillinfer.near_storage.frames import Frames
from penstock.methods.hillinfer.near_storage.hello import greet
from penstock.methods.hillinfer.policy import HillInfer
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.testing.near_rig import NearRig
from penstock.testing.tiny_models import VOCABULARY, tiny_model
from research.near_storage.host_process import HostProcess
from research.near_storage.relay import Relay

FAULTS = ("killed", "frozen", "cut", "reset", "slow", "impostor", "garbage")
"""cut: nothing passes any more; reset: connections end, and new ones; slow: 20 ms each way."""
PROMPT, ANSWER = 200, 12
EARLY = 10
"""One trial of so many has its fault while the cache opens."""
TIMEOUT_S = 3.0
AT_START = "before anything was stored"
"""A cache that finds a host missing when it opens is refused, with copies too."""
MOST_S = 6 * TIMEOUT_S + 6
"""A trial that takes longer hangs: a fault may cost a deadline on each connection."""


class Place:
    """A host and the relay before it."""

    def __init__(self, folder: Path, key: Path) -> None:
        self._folder, self._key = folder, key
        self.host = HostProcess(key, folder)
        self.relay = Relay(("127.0.0.1", self.host.port))

    def fail(self, fault: str, other_key: Path) -> None:
        """Let it happen."""
        if fault in ("killed", "impostor"):
            self.host.end()
            if fault == "impostor":
                listen = f"127.0.0.1:{self.host.port}"
                self.host = HostProcess(other_key, self._folder, listen=listen)
        elif fault == "frozen":
            self.host.process.send_signal(signal.SIGSTOP)
        elif fault == "reset":
            self.relay.cut()
        elif fault == "slow":
            self.relay.delay_s = 0.02
        else:
            self.relay.mode = "hole" if fault == "cut" else "garbage"

    def close(self) -> None:
        """End both."""
        self.relay.close()
        self.host.end()


def answer(
    model: Any, prompt: torch.Tensor, policy: HillInfer,
    opened: Callable[[], None] = lambda: None,
) -> list[int]:  # fmt: skip
    """The tokens that the model says; `opened` is called when the cache has its devices."""
    with contextlib.ExitStack() as stack:
        try:
            cache = stack.enter_context(TieredCache(
                model, policy, None, "memory", max_tokens=PROMPT + ANSWER + 2, must_tier=True
            ))  # fmt: skip
        except PenstockError as error:
            error.add_note(AT_START)
            raise
        opened()
        out = model.generate(
            prompt, **cache_argument(model, cache), max_new_tokens=ANSWER, do_sample=False,
            eos_token_id=None, pad_token_id=0, attention_mask=torch.ones_like(prompt),
        )  # fmt: skip
    found: list[int] = out[0, prompt.shape[1] :].tolist()
    return found


def policy(**options: Any) -> HillInfer:
    """A small hot pool, so that most is with the devices."""
    return HillInfer(alpha=0.2, hot_tokens=64, window_tokens=16, timeout_s=TIMEOUT_S, **options)


def trial(model: Any, seed: int, folder: Path, keys: tuple[Path, Path]) -> dict[str, Any]:
    """One answer with a fault in it."""
    draw = random.Random(seed)
    fault, copies = FAULTS[seed % len(FAULTS)], 1 + seed // len(FAULTS) % 2
    prompt = torch.randint(
        3, VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(seed)
    )
    begun = time.monotonic()
    expected = answer(model, prompt, policy())
    usual_s = time.monotonic() - begun
    places = [Place(folder, keys[0]) for _ in range(2)]
    try:
        devices = ",".join(f"tcp://{place.relay.address}" for place in places)
        failing = places[draw.randrange(2)]
        when = draw.random() * usual_s
        timer = threading.Timer(when, failing.fail, (fault, keys[1]))
        if early := seed % EARLY == EARLY - 1:
            timer.start()
        begun, said = time.monotonic(), ""
        try:
            found = answer(
                model, prompt,
                policy(devices=devices, device_key=f"file:{keys[0]}", copies=copies),
                lambda: None if early else timer.start(),
            )  # fmt: skip
            ended = "right" if found == expected else "wrong"
        except PenstockError as error:
            ended = "refused" if AT_START in getattr(error, "__notes__", ()) else "typed"
            said = f"{type(error).__name__}: {error}"
        took_s = time.monotonic() - begun
        timer.cancel()
        if timer.ident is not None:
            timer.join()
    finally:
        for place in places:
            place.close()
    return {
        "seed": seed, "fault": fault, "copies": copies, "at_s": round(when, 3), "ended": ended,
        "said": said, "seconds": round(took_s, 3), "hung": took_s > MOST_S,
    }  # fmt: skip


class _Kept:
    """In place of a connection: keeps what is sent."""

    def __init__(self) -> None:
        self.data = b""

    def sendall(self, data: bytes) -> None:
        """Keep it."""
        self.data += bytes(data)


def fuzz(count: int, seed: int, folder: Path, key: Path) -> dict[str, Any]:
    """Send so many damaged frames to a host, with its key; another cache's scores stay."""
    draw, secret, host = random.Random(seed), key.read_bytes(), HostProcess(key, folder)
    worst, begun = 0.0, time.monotonic()
    try:
        address = ("127.0.0.1", host.port)
        with NearRig("memory", devices=f"tcp://{host.address}", key=secret) as rig:
            rig.fill()
            expected = rig.score(rig.tokens)
            for number in range(count):
                started = time.monotonic()
                with (
                    socket.create_connection(address, timeout=10) as connection,
                    contextlib.suppress(ConnectionError),
                ):
                    seeds = greet(connection, secret, started + 10)
                    connection.settimeout(10)
                    kept = _Kept()
                    frames = Frames(kept, seeds.of_cache, seeds.of_device)  # type: ignore[arg-type]
                    told = {"pool": "x", "rows": 1}
                    frames.send(1, (
                        protocol.Configure(told) if number % 2 else protocol.Write(0, 0, 0, 512)
                    ))  # fmt: skip
                    data = bytearray(kept.data)
                    for _ in range(draw.randint(1, 3)):
                        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(4096):
                        pass
                worst = max(worst, time.monotonic() - started)
            same = bool((rig.score(rig.tokens) == expected).all())
    finally:
        host.end()
    return {
        "frames": count, "worst_s": round(worst, 3), "others_scores_stay": same,
        "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def run(arguments: Sequence[str]) -> Result:
    """Do all trials, then fuzz."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak_devices")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--frames", type=int, default=5000)
    args = read_options(parser, arguments, resume=False)
    settings = {"trials": args.trials, "frames": args.frames, "timeout_s": TIMEOUT_S}
    result = Result.begin(
        "near_storage.faults", arguments, settings, seed=args.seed, package="research"
    )
    shown = public_arguments(arguments)
    result.command = f"python -m tests.soak_devices {shown}".strip()
    torch.set_num_threads(1)
    model, begun = tiny_model("llama"), time.monotonic()
    before = set(psutil.Process().children(recursive=True))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = (folder / "key", folder / "other")
        for key in keys:
            key.write_bytes(os.urandom(32))
            key.chmod(0o600)
        result.figures["fuzz"] = fuzz(args.frames, args.seed, folder, keys[0])
        say(f"fuzzed: {result.figures['fuzz']}")
        trials: list[dict[str, Any]] = []
        for seed in range(args.seed, args.seed + args.trials):
            if args.minutes and time.monotonic() - begun > args.minutes * 60:
                break
            trials.append(trial(model, seed, folder, keys))
            say(str(trials[-1]))
    children = set(psutil.Process().children(recursive=True)) - before
    counts = Counter(f"{one['fault']}, copies {one['copies']}: {one['ended']}" for one in trials)
    bad = [
        one for one in trials
        if one["hung"] or one["ended"] in ("wrong", "typed")[: one["copies"]]
    ]  # fmt: skip
    result.figures |= {
        "trials": len(trials), "counts": dict(sorted(counts.items())), "bad": bad,
        "worst_s": max((one["seconds"] for one in trials), default=0.0),
        "orphans": len(children), "every": trials,
    }  # fmt: skip
    closed(result, args, "\n".join(f"{count:4} {name}" for name, count in counts.items()))
    if bad or children or not result.figures["fuzz"]["others_scores_stay"]:
        raise StorageError(f"{len(bad)} trials went wrong, {len(children)} processes are left")
    return result


if __name__ == "__main__":
    run_program(run)
