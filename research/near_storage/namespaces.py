"""`python -m research.near_storage.namespaces`: device hosts in network namespaces, by link.

Each host is a process in a namespace of its own, behind a veth pair. Bandwidth is set by tc tbf on
both ends. Latency is a relay's in the host's process (`Relay`), half the round trip each way: tc's
netem, which would set it below TCP, is not in every kernel. A relay keeps TCP's own windows as on a
link without latency, and copies every byte once more. A model continues a prompt with its cache on
the hosts; the tokens must be those of one local device. "all_keys": reading every unit of every
layer once by the same link, of which keys are half; what a step would move that scores where the
model runs. Wants root.
"""

import argparse
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.core.errors import ConfigError, StorageError
from penstock.evaluate.entry import run_program
from penstock.evaluate.number_lists import real_numbers, whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed, say
from penstock.evaluate.text_table import format_table
from penstock.methods.hillinfer.near_storage.near_store import NearStore
from penstock.methods.hillinfer.near_storage.tcp_device import TcpDevice
from penstock.methods.hillinfer.policy import HillInfer
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import load
from penstock.storage.aligned_buffer import AlignedBuffer
from research.near_storage.host_process import HostProcess

_READ_UNITS = 4096


@contextlib.contextmanager
def hosts(
    count: int, gigabits: float, round_trip_ms: float, folder: Path, key: Path
) -> Iterator[list[str]]:
    """So many hosts behind such links; yields their addresses, and takes all down again."""
    started: list[HostProcess] = []
    mark = f"pk{os.getpid() % 100000}"
    names = [f"{mark}n{i}" for i in range(count)]
    try:
        for i, name in enumerate(names):
            near, far, net = f"{mark}a{i}", f"{mark}b{i}", f"10.213.{i}"
            inside = ("ip", "netns", "exec", name)
            _do("ip", "netns", "add", name)
            _do("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
            _do("ip", "addr", "add", f"{net}.1/30", "dev", near)
            _do("ip", "link", "set", near, "up")
            _do(*inside, "ip", "addr", "add", f"{net}.2/30", "dev", far)
            for device in (far, "lo"):
                _do(*inside, "ip", "link", "set", device, "up")
            rate = ("root", "tbf", "rate", f"{gigabits}gbit", "burst", "1mb", "latency", "50ms")
            _do("tc", "qdisc", "add", "dev", near, *rate)
            _do(*inside, "tc", "qdisc", "add", "dev", far, *rate)
            started.append(HostProcess(
                key, folder, listen=f"{net}.2:8471", delay_s=round_trip_ms / 2000, before=inside
            ))  # fmt: skip
        yield [host.address for host in started]
    finally:
        for host in started:
            host.end()
        for i, name in enumerate(names):
            for what in (("link", "del", f"{mark}a{i}"), ("netns", "del", name)):
                with contextlib.suppress(StorageError):
                    _do("ip", *what)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StorageError(f"{' '.join(command)}: {done.stderr.strip()}")


def decode(
    model: Any, prompt: torch.Tensor, output: int, policy: HillInfer, *, whole: bool = False
) -> dict[str, Any]:
    """Continue a prompt greedily: tokens, seconds of the steps, and bytes on the wire.

    Args:
        whole: then read every unit of every layer once.
    """
    most = prompt.shape[1] + output + 1
    with (
        torch.no_grad(),
        TieredCache(model, policy, None, "memory", max_tokens=most, must_tier=True) as cache,
    ):
        given, begun = cache_argument(model, cache), time.perf_counter()
        step, tokens = model(prompt, **given, logits_to_keep=1), []
        prompt_s = time.perf_counter() - begun
        store = cache._runtime._store
        assert isinstance(store, NearStore)
        before, begun = _wire(store), time.perf_counter()
        for _ in range(output):
            tokens.append(int(step.logits[0, -1].argmax()))
            step = model(torch.tensor([[tokens[-1]]]), **given)
        took = time.perf_counter() - begun
        found = {
            "tokens": tokens, "tokens_per_s": output / took, "prompt_s": prompt_s,
            "prompt_wire_bytes": before, "step_wire_bytes": (_wire(store) - before) / output,
        }  # fmt: skip
        if whole:
            before, begun = _wire(store), time.perf_counter()
            for layer in range(store.devices[0].settings.layers):
                _read_all(store, layer, int(prompt.shape[1]) - 64)
            found["all_units_s"] = time.perf_counter() - begun
            found["all_units_wire_bytes"] = _wire(store) - before
    return found


def _wire(store: NearStore) -> int:
    return sum(each.wire_bytes for each in store.devices if isinstance(each, TcpDevice))


def _read_all(store: NearStore, layer: int, units: int) -> None:
    region = store.region(layer)
    for first in range(0, units, _READ_UNITS):
        part = np.arange(first, min(units, first + _READ_UNITS))
        buffer = AlignedBuffer(len(part), region.padded_bytes)
        region.submit_read(part, buffer, np.arange(len(part))).wait()


def run(arguments: Sequence[str]) -> Result:
    """Every link, every number of hosts, every seed."""
    parser = argparse.ArgumentParser(prog="python -m research.near_storage.namespaces")
    add = parser.add_argument
    add("--model", default="recall")
    add("--prompt", type=int, default=2048)
    add("--max-new-tokens", type=int, default=24)
    add("--hosts", default="2,4")
    add("--round-trips", default="0.1,0.5,2", help="milliseconds")
    add("--gigabits", default="1,10")
    add("--seeds", default="0,1")
    add("--hot", type=int, default=512, help="tokens of the hot pool")
    args = read_options(parser, arguments, seed=False, resume=False)
    if os.geteuid():
        raise ConfigError("network namespaces want root")
    counts, seeds = (whole_numbers(args.hosts, "--hosts"), whole_numbers(args.seeds, "--seeds",
                                                                        least=0))  # fmt: skip
    result = Result.begin(
        "near_storage.namespaces", arguments,
        {name: value for name, value in vars(args).items() if name not in ("out", "json")}
        | {"latency": "a relay in the host's process", "bandwidth": "tc tbf"},
        seed=seeds[0], package="research",
    )  # fmt: skip
    torch.set_num_threads(1)
    model = load(args.model, dtype=torch.float32).model
    common = {"alpha": 0.1, "hot_tokens": args.hot, "window_tokens": 64}
    rows: list[dict[str, Any]] = []
    result.figures["rows"] = rows
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, key = Path(name), Path(name) / "key"
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
        links = list(product(real_numbers(args.gigabits, "--gigabits"),
                             real_numbers(args.round_trips, "--round-trips"), counts))  # fmt: skip
        for seed in seeds:
            if args.minutes and time.monotonic() - begun > args.minutes * 60:
                break
            prompt = torch.randint(
                3, model.config.vocab_size, (1, args.prompt),
                generator=torch.Generator().manual_seed(seed),
            )  # fmt: skip
            local = decode(model, prompt, args.max_new_tokens, HillInfer(**common))
            rows.append({"seed": seed, "hosts": 0} | local)
            say(f"seed {seed}, one local device: {local['tokens_per_s']:.1f} tokens/s")
            for gigabits, round_trip, count in links:
                if args.minutes and time.monotonic() - begun > args.minutes * 60:
                    break
                with hosts(count, gigabits, round_trip, folder, key) as addresses:
                    policy = HillInfer(
                        devices=",".join(f"tcp://{each}" for each in addresses),
                        device_key=f"file:{key}", **common,
                    )  # fmt: skip
                    row = decode(model, prompt, args.max_new_tokens, policy, whole=True)
                row = {"seed": seed, "hosts": count, "gigabits": gigabits,
                       "round_trip_ms": round_trip, "same": row["tokens"] == local["tokens"],
                       "of_local": row["tokens_per_s"] / local["tokens_per_s"]} | row  # fmt: skip
                rows.append(row)
                say(f"{_line(row)}")
                if args.out:
                    result.save(args.out)
    linked = [row for row in rows if row["hosts"]]
    result.figures["seeds"] = sorted({row["seed"] for row in linked})
    header = ["seed", "hosts", "Gb/s", "ms", "same", "tokens/s", "KiB a step", "all keys, KiB",
              "all keys, s"]  # fmt: skip
    closed(result, args, format_table(header, [_line(row) for row in linked]))
    if not all(row["same"] for row in linked):
        raise StorageError("tokens differ from those of one local device")
    return result


def _line(row: dict[str, Any]) -> list[str]:
    return [
        str(row["seed"]), str(row["hosts"]), f"{row['gigabits']:g}", f"{row['round_trip_ms']:g}",
        str(row["same"]), f"{row['tokens_per_s']:.1f}", f"{row['step_wire_bytes'] / 1024:.0f}",
        f"{row['all_units_wire_bytes'] / 2048:.0f}", f"{row['all_units_s'] / 2:.3f}",
    ]  # fmt: skip


if __name__ == "__main__":
    run_program(run)
