"""The rows of the peers table: which peers there are, what a row holds, and the table as text."""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from limited_process import Ending
from prepared import Samples

from penstock.evaluate.text_table import format_table

GIB = 2**30
_PEAKS = ("load_peak_bytes", "fill_peak_bytes", "decode_peak_bytes", "peak_bytes")
_PATHS = re.compile(r"(?<![\w.])/[^\s'\":]*/")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One program to compare with: its script, and the ways in which it is run.

    Attributes:
        settings: run unless others are asked for.
        on_demand: run where they are asked for by name.
    """

    script: str
    settings: tuple[str, ...]
    on_demand: tuple[str, ...] = ()


PEERS: Mapping[str, Peer] = MappingProxyType({
    "transformers": Peer(
        script="transformers_cache.py", settings=("dynamic", "quanto", "hqq")
    ),
    "kvpress": Peer(
        script="kvpress_press.py", settings=("snapkv", "expected_attention", "knorm"),
        on_demand=("streaming_llm",),
    ),
    "ollm": Peer(script="ollm_disk.py", settings=("disk",)),
    "llama.cpp": Peer(
        script="llama_cpp_cache.py", settings=("f16", "q8_0", "q4_0"),
        on_demand=tuple(
            f"{cache}-{weights}{option}"
            for option in ("", "-mapped", "-unfused")
            for weights in ("q4_0", "q4_k_m")
            for cache in ("f16", "q8_0", "q4_0")
            if option != "-unfused" or cache == "f16"
        ),
    ),
    "penstock": Peer(
        script="penstock_cache.py", settings=("kvswap",),
        on_demand=("kvswap-int4", "kvswap-int8"),
    ),
})  # fmt: skip
"""By the name of their environments."""


@dataclass(kw_only=True)
class PeerRow:
    """One peer in one setting at one length.

    Attributes:
        speed: what the speed process measured; empty when it failed.
        recall: answers that were right, and of how many; empty when it failed.
        prompt: what the prompt process measured; empty when it failed.
        planned: what Penstock's cost model says of the row, from this machine's constants.
        failures: by job, how the process failed: "kind", "phase" and "error".
    """

    peer: str
    setting: str
    context: int
    speed: dict[str, Any] = field(default_factory=dict)
    recall: dict[str, Any] = field(default_factory=dict)
    prompt: dict[str, Any] = field(default_factory=dict)
    planned: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The row's first cell."""
        return f"{self.peer} {self.setting}"

    def fail(self, job: str, kind: str, phase: str, error: str) -> None:
        """Note that a job failed, without paths of this machine."""
        self.failures[job] = {
            "kind": kind, "phase": phase, "error": _PATHS.sub("", error)[:300]
        }  # fmt: skip

    def take(self, job: str, ending: Ending, limit_bytes: int) -> dict[str, Any] | None:
        """The reply of a process, or None and the failure noted."""
        if ending.failure is not None:
            self.fail(job, ending.kind, ending.phase, ending.failure)
            return None
        reply = parse_reply(ending.output)
        if reply is None:
            self.fail(job, "error", ending.phase, "no reply")
            return None
        self.versions.update(reply.pop("versions", {}))
        most = max(int(reply.get(name, 0)) for name in _PEAKS)
        if most > limit_bytes:
            self.fail(job, "memory", ending.phase, f"had {most / GIB:.2f} GiB resident for a while")
            return None
        return reply

    def take_speed(self, reply: dict[str, Any]) -> None:
        """Sum up step times."""
        steps = sorted(reply["step_s"])
        self.speed = {
            **reply, "tokens_per_s": len(steps) / sum(steps), "step_ms": {
                "median": 1e3 * statistics.median(steps), "p10": 1e3 * steps[len(steps) // 10],
                "p90": 1e3 * steps[(9 * len(steps)) // 10],
            },
        }  # fmt: skip

    def take_prompt(self, reply: dict[str, Any]) -> None:
        """Note the time of a prompt."""
        self.prompt = {**reply, "tokens_per_s": self.context / reply["prompt_s"]}

    def take_recall(self, reply: dict[str, Any], samples: Samples) -> None:
        """Judge the answers."""
        right = [samples.score(ids, index) for index, ids in enumerate(reply.pop("answers"))]
        self.recall = {
            **reply, "scores": right, "right": sum(right), "answered": len(right),
            "asked": len(samples.plain),
        }  # fmt: skip

    def has(self, job: str) -> bool:
        """Whether a job was done, or failed for what it is; not for a failed installation."""
        failed = self.failures.get(job)
        return bool(getattr(self, job)) or (failed is not None and failed["kind"] != "install")

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def of_dict(cls, plain: dict[str, Any]) -> "PeerRow":
        """The row that `as_dict` was of."""
        return cls(**{name: value for name, value in plain.items() if name != "name"})


def parse_reply(output: str) -> dict[str, Any] | None:
    """The last line that is a JSON object; libraries print other things before it."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                found: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return found
    return None


_HEADER = (
    "peer",
    "tokens/s",
    "ms/step",
    "p10",
    "p90",
    "peak",
    "fill peak",
    "page cache",
    "fill s",
    "prompt/s",
    "planned/s",
    "right",
)


def peers_table(rows: Sequence[PeerRow]) -> str:
    """The table, one part per length; memory in GiB, and below how what failed did so."""
    parts = []
    for context in sorted({row.context for row in rows}):
        cells = [_cells(row) for row in rows if row.context == context]
        notes = [
            f"{row.name}, {job}: {_said(failure)}"
            for row in rows
            if row.context == context
            for job, failure in row.failures.items()
        ]
        parts.append("\n".join([f"{context} tokens", format_table(_HEADER, cells), *notes]))
    return "\n\n".join(parts)


def _cells(row: PeerRow) -> list[str]:
    ends = [_prompt(row), _planned(row), _right(row)]
    speed = row.speed
    if "speed" in row.failures:
        failed = f"FAILED ({row.failures['speed']['kind']}); recall: {ends[-1]}"
        return [row.name, f"{failed}; prompt: {ends[0]}"]
    if not speed:
        return [row.name, *["-"] * (len(_HEADER) - 4), *ends]
    step = speed["step_ms"]
    return [
        row.name, f"{speed['tokens_per_s']:.2f}",
        *(f"{step[name]:.0f}" for name in ("median", "p10", "p90")),
        _gib(speed["decode_peak_bytes"]), _gib(speed["fill_peak_bytes"]),
        _gib(speed.get("page_cache_bytes", 0)), f"{speed['fill_s']:.0f}", *ends,
    ]  # fmt: skip


def _right(row: PeerRow) -> str:
    if "recall" in row.failures:
        return f"FAILED ({row.failures['recall']['kind']})"
    if not row.recall:
        return "-"
    return f"{row.recall['right']:g}/{row.recall['answered']}"


def _prompt(row: PeerRow) -> str:
    if "prompt" in row.failures:
        return f"FAILED ({row.failures['prompt']['kind']})"
    return f"{row.prompt['tokens_per_s']:.0f}" if row.prompt else "-"


def _planned(row: PeerRow) -> str:
    return f"{row.planned['tokens_per_s']:.2f}" if "tokens_per_s" in row.planned else "-"


def _said(failure: Mapping[str, str]) -> str:
    return f"FAILED ({failure['kind']}) in {failure['phase']}: {failure['error']}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes else "-"
