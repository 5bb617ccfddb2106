"""Compare Penstock with its peers, each in its own environment and process, under one memory limit.

python benchmarks/peers/run.py --lengths 8192,32768 --limit 3GiB
"""

import argparse
import json
import math
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environments import ENVIRONMENTS, TORCH, InstallError, build
from lanes import Lane, make_lanes, parse_cores, run_in_lanes
from limited_process import Limits, run_limited
from peer_rows import PEERS, PeerRow, peers_table
from planned import measure_machine, planned
from prepared import (
    BUNDLED,
    HERE,
    Models,
    check_tasks,
    prepare_gguf,
    prepare_models,
    prepare_packed,
    prepare_samples,
    weights_bytes,
)
from protocol import weights_of

from penstock.core.byte_size import parse_bytes
from penstock.core.errors import ConfigError, PenstockError
from penstock.evaluate.result import Result

JOBS = ("speed", "recall", "prompt")
HIDDEN = ("envs", "store", "out", "memory_cgroup", "pip_arguments", "prepare_only", "verbose",
          "resume", "python", "minutes")  # fmt: skip
"""Options that name places or change no figure: left out of the result."""


class Run:
    """The state of one comparison: environments, models, samples, and the rows so far."""

    def __init__(self, args: argparse.Namespace, result: Result) -> None:
        """Prepare nothing yet."""
        self.args = args
        self.result = result
        self.rows: list[PeerRow] = []
        self.limit_bytes = parse_bytes(args.limit)
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + 60 * args.minutes

    def run(self) -> None:
        """Everything, with the result saved after each row."""
        args = self.args
        check_tasks(args.tasks, args.recall_model)
        self.models = prepare_models(
            args.store, args.config, args.seed, recall=args.recall_model, coded=args.coded
        )
        self.samples = {
            length: prepare_samples(
                args.store, self.models.recall, args.tasks, length, args.samples, args.seed
            )
            for length in args.lengths
        }
        ready = {peer: self._environment(peer) for peer in args.peers}
        if args.prepare_only:
            return
        if "penstock" in args.peers:
            self.machine = measure_machine(args.threads, args.store)
            self.result.machine["constants"] = self.machine.figures
        rows = [
            self._row(peer, setting, length)
            for length in args.lengths for peer in args.peers for setting in self._wanted(peer)
        ]  # fmt: skip
        for row in rows:
            self._plan(row)
        for job in args.jobs:  # one kind of work at a time, so that all rows have the same beside
            lanes = make_lanes(args.cores, self._threads(job)[1], args.parallel)
            run_in_lanes(
                lanes, [lambda lane, row=row, job=job: self._fill(row, job, lane, *ready[row.peer])
                        for row in rows]
            )  # fmt: skip

    def _threads(self, job: str) -> tuple[int, int]:
        """Threads for decoding, and for what goes before it or for prompts."""
        decoding = self.args.threads
        if job == "speed" and self.args.prefill == "synthetic":
            return decoding, decoding
        return decoding, max(decoding, self.args.prompt_threads or decoding)

    def take_up(self, former: Result) -> None:
        """Keep the rows of an interrupted run, or of one with another job.

        Raises:
            ConfigError: that run asked for something else.
        """
        for name in ("limit", "keep", "config", "prefill", "tasks", "samples", "seed", "threads",
                     "prompt_threads", "parallel", "recall_model", "coded"):  # fmt: skip
            mine = shown_value(self.args, name)
            its = former.settings.get(name, mine)  # an older result does not say all
            if mine != its:
                raise ConfigError(f"cannot resume: the result was made with --{name} {its}")
        self.rows = [PeerRow.of_dict(plain) for plain in former.figures["rows"]]
        for name in ("lengths", "peers", "jobs"):
            both = dict.fromkeys([*former.settings[name], *getattr(self.args, name)])
            self.result.settings[name] = list(both)
        if former.command != self.result.command:
            self.result.command = f"{former.command}; then {self.result.command} --resume"

    def _row(self, peer: str, setting: str, length: int) -> PeerRow:
        for row in self.rows:
            if (row.peer, row.setting, row.context) == (peer, setting, length):
                return row
        self.rows.append(PeerRow(peer=peer, setting=setting, context=length))
        return self.rows[-1]

    def _wanted(self, peer: str) -> list[str]:
        known, wanted = PEERS[peer], self.args.settings
        if not wanted:
            return list(known.settings)
        return [
            setting for setting in (*known.settings, *known.on_demand)
            if setting in wanted or f"{peer}:{setting}" in wanted
        ]  # fmt: skip

    def _environment(self, peer: str) -> tuple[Path, dict[str, Models], str]:
        """Interpreter of a peer, and models by the kind of their weights; or why there are none."""
        say(f"environment of {peer}")
        kinds = dict.fromkeys(map(weights_of, self._wanted(peer)))
        models = dict.fromkeys(kinds, self.models)
        make = {"llama.cpp": prepare_gguf, "penstock": prepare_packed}.get(peer)
        try:
            python = self.args.python.get(peer) or build(
                peer, self.args.envs, torch=self.args.torch,
                pip_arguments=shlex.split(self.args.pip_arguments),
            )  # fmt: skip
            if make is not None:
                for kind in kinds:
                    say(f"weights of {peer}: {kind}")
                    needed = {self.models.of(job) for job in self.args.jobs}
                    models[kind] = Models(*(
                        make(folder, python, kind) if folder in needed else folder
                        for folder in (self.models.speed, self.models.recall)
                    ))  # fmt: skip
        except (InstallError, RuntimeError) as error:
            say(f"  {error}")
            return Path(), models, str(error)
        return python, models, ""

    def _plan(self, row: PeerRow) -> None:
        if row.peer == "penstock":
            row.planned = planned(
                self.models.speed, self.machine, context=row.context, keep=self.args.keep,
                weights=weights_of(row.setting), policy=row.setting.split("-")[0],
            )  # fmt: skip

    def _fill(
        self, row: PeerRow, job: str, lane: Lane, python: Path, models: dict[str, Models],
        problem: str,
    ) -> None:  # fmt: skip
        """Do a row's job, and save the result; nothing when that was done, or time is up."""
        left = self._deadline - time.monotonic()
        if row.has(job) or left <= 0:
            return
        if problem:
            row.fail(job, "install", "install", problem)
        else:
            say(f"{row.context} {row.name}: {job}")
            row.failures.pop(job, None)
            model = models[weights_of(row.setting)].of(job)
            self._do_job(row, job, lane, python, model, min(left, self.args.timeout))
        with self._lock:
            self.result.figures = {"rows": [row.as_dict() for row in self.rows]}
            self.result.save(self.args.out)

    def _do_job(
        self, row: PeerRow, job: str, lane: Lane, python: Path, model: Path, timeout_s: float
    ) -> None:
        args = self.args
        samples = self.samples[row.context]
        scratch = args.store / f"scratch-{lane.number}"
        threads, prompt_threads = self._threads(job)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        request = {
            "job": job, "setting": row.setting, "model": str(model), "context": row.context,
            "threads": threads, "prompt_threads": prompt_threads, "cores": lane.cores,
            "seed": args.seed, "keep": args.keep,
            "prefill": args.prefill, "chunk": args.chunk, "steps": args.steps, "whole": args.whole,
            "decode_s": args.decode_seconds, "samples": str(samples.path),
            "recall_s": args.recall_seconds, "scratch": str(scratch),
            "drop_page_cache": args.page_cache == "drop",
            "reports": list(ENVIRONMENTS[row.peer].reports),
        }  # fmt: skip
        limits = Limits(
            memory_bytes=self.limit_bytes, data_extra_bytes=weights_bytes(model),
            timeout_s=timeout_s, cgroup=args.memory_cgroup, cores=lane.cores,
        )  # fmt: skip
        command = [str(python), str(HERE / PEERS[row.peer].script), json.dumps(request)]
        try:
            ending = run_limited(command, limits, child_environment(prompt_threads))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        title = f"  {row.context} {row.name}:"
        reply = row.take(job, ending, self.limit_bytes)
        if reply is None:
            failure = row.failures[job]
            say(f"{title} FAILED ({failure['kind']}) in {failure['phase']}: {failure['error']}")
            if args.verbose:
                say(ending.output)
            return
        reply["process_s"] = ending.seconds
        if job == "speed":
            row.take_speed(reply)
            say(f"{title} {row.speed['tokens_per_s']:.2f} tokens/s")
        elif job == "prompt":
            row.take_prompt(reply)
            say(f"{title} {row.prompt['tokens_per_s']:.0f} tokens/s of a prompt")
        else:
            row.take_recall(reply, samples)
            say(f"{title} {row.recall['right']:g} of {row.recall['answered']} right")


def child_environment(threads: int) -> dict[str, str]:
    """Environment variables of a peer: offline, and as many threads as asked for."""
    return {
        **os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONNOUSERSITE": "1", "PYTHONPATH": "",
    }  # fmt: skip


def shown_value(args: argparse.Namespace, name: str) -> Any:
    """An option's value as a result has it: a model by its name, without its place."""
    value = getattr(args, name, None)
    return Path(value).name if name == "recall_model" else value


def public_command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """The options that differ from their defaults, without places."""
    shown = ["python benchmarks/peers/run.py"]
    for action in parser._actions:
        value = shown_value(args, action.dest)
        if action.dest in HIDDEN or value is None or value == action.default:
            continue
        name = action.option_strings[-1]
        if isinstance(value, list):
            value = ",".join(map(str, value))
        shown.append(name if value is True else f"{name} {value}")
    return " ".join(shown)


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def words(text: str) -> list[str]:
    """A list separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def choice_of(known: Sequence[str]) -> Any:
    """A parser of lists whose words must be known."""

    def parse(text: str) -> list[str]:
        found = words(text)
        if unknown := [word for word in found if word not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return found

    return parse


def interpreters(text: str) -> dict[str, Path]:
    """The interpreter of each peer that `text` has one for; one without a name is for all."""
    found: dict[str, Path] = {}
    for word in words(text):
        peer, _, file = word.rpartition("=")
        found |= dict.fromkeys([peer] if peer else PEERS, Path(file))
    return found


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--lengths", type=lambda text: [int(word) for word in words(text)], default=[8192, 32768])
    add("--limit", default="3GiB", help="memory of each process, weights and libraries included")
    add("--peers", type=choice_of(list(PEERS)), default=list(PEERS))
    add("--settings", type=words, default=[], help="such as hqq or kvpress:knorm; default: all")
    add("--jobs", type=choice_of(JOBS), default=["speed", "recall"])
    add("--keep", default="1/13", help="share of the cache for kvpress and Penstock")
    add("--config", default="qwen3-0.6b", help="architecture of the speed model")
    add("--coded", action="store_true", help="the speed model has random 4-bit codes alone")
    add("--recall-model", default=BUNDLED, help="recall, or a folder with bf16 weights")
    add("--prefill", choices=("synthetic", "real"), default="synthetic")
    add("--chunk", type=int, default=1024, help="tokens per forward pass of a real prefill")
    add("--steps", type=int, default=32)
    add("--decode-seconds", type=float, default=60.0, help="most seconds of measured steps")
    add("--whole", type=int, default=8192,
        help="of longer prompts two chunks are read, with noise before the last")  # fmt: skip
    add("--tasks", type=words, default=["single_essay", "multi_key_few"])
    add("--samples", type=int, default=6, help="for each length")
    add("--recall-seconds", type=float, default=420.0, help="no sample is begun after this")
    add("--timeout", type=float, default=1200.0, help="seconds for each process")
    add("--threads", type=int, default=2)
    add("--prompt-threads", type=int, help="of prompts; as many as --threads unless said")
    add("--parallel", type=int, default=1, metavar="ROWS", help="at once")
    add("--cores", type=parse_cores, default=[], metavar="LIST",
        help="such as 8-31,40: a process is kept on one for each of its threads")  # fmt: skip
    add("--minutes", type=float, default=math.inf, help="after which no process goes on")
    add("--seed", type=int, default=0)
    add("--page-cache", choices=("drop", "keep"), default="drop",
        help="of peers that read through it, between steps")  # fmt: skip
    add("--memory-cgroup", type=Path, help="control group below which groups may be made")
    add("--envs", type=Path, default=HERE / ".envs")
    add("--python", type=interpreters, default={}, metavar="[PEER=]FILE,...",
        help="interpreters that have what peers need, in place of environments")  # fmt: skip
    add("--store", type=Path, default=HERE / ".work", help="models and scratch files")
    add("--out", type=Path, default=HERE.parent / "results" / "peers.json")
    add("--resume", action="store_true", help="keep what --out has; do the jobs that it lacks")
    add("--torch", default=TORCH)
    add("--pip-arguments", default="", help="such as --pip-arguments='--index-url ADDRESS'")
    add("--prepare-only", action="store_true", help="environments, models and samples")
    add("--verbose", action="store_true", help="show the output of processes that fail")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    args.store.mkdir(parents=True, exist_ok=True)
    settings = {name: shown_value(args, name) for name in vars(args) if name not in HIDDEN}
    limits = Limits(memory_bytes=0, timeout_s=0, cgroup=args.memory_cgroup)
    settings["memory_limit"] = limits.how
    result = Result.begin("peers", [], settings, seed=args.seed, store=str(args.store))
    result.command = public_command(parser, args)
    result.machine["threads"] = args.threads
    run = Run(args, result)
    try:
        if args.resume and args.out.exists():
            run.take_up(Result.load(args.out))
        run.run()
    except PenstockError as error:
        say(str(error))
        return 2
    print(peers_table(run.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
