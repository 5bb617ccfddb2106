"""`python -m research.device_tier.kernels`: each kernel beside a ceiling and its torch twin.

Ceilings are measured in the same run: copies between pinned memory and the GPU, a copy within the
GPU, a bfloat16 matrix product. k-means is set beside the prefill of the same prompt.
"""

import argparse
import gc
from collections.abc import Sequence
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.evaluate.entry import run_program
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import Sitting, closed
from penstock.evaluate.text_table import format_table
from penstock.models.plain_model import ARCHITECTURES
from research.device_tier.kernel_cases import (
    KMEANS,
    SMALL,
    Cases,
    Grid,
    KernelCase,
    append_cases,
    attention_cases,
    boundary_cases,
    cluster_cases,
    gather_cases,
    host_buffer,
    prefill_layer_s,
    selection_cases,
    slot_cases,
)
from research.device_tier.timers import CallTime, time_calls, without_triton

KIND = "device_tier.kernels"
_TOPICS = ("gather", "append", "attention", "selection", "slots", "boundaries", "kmeans")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m research.{KIND}", description=__doc__)
    add = parser.add_argument
    add("--topics", default=",".join(_TOPICS))
    add("--config", default="llama-3.1-8b", choices=list(ARCHITECTURES), help="of the prefill")
    add("--small", action="store_true", help="tiny sizes, to see the program run")
    add("--most-seconds", type=float, default=0.12, help="of one measurement")
    add("--on", default="cuda", choices=["cpu", "cuda"])
    args = read_options(parser, arguments, resume=False)
    for topic in args.topics.split(","):
        if topic not in _TOPICS:
            raise ConfigError(f"there is no topic {topic!r}; choose from {', '.join(_TOPICS)}")
    if args.on == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here; try --on cpu --small")
    return args


def ceilings(grid: Grid, device: torch.device) -> dict[str, float]:
    """What this machine can do: bytes or operations a second."""
    small = grid is SMALL
    size = 1 << 20 if small else 256 << 20
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    one = torch.zeros(size, dtype=torch.uint8, device=device)
    two = torch.zeros_like(one)
    wide = 256 if small else 8192
    matrix = torch.randn(wide, wide, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(matrix)

    def rate(amount: float, call: Any) -> float:
        return amount / time_calls([call], device, graph=False).seconds

    return {
        "pinned to GPU": rate(size, lambda: one.copy_(host, non_blocking=True)),
        "GPU to pinned": rate(size, lambda: host.copy_(one, non_blocking=True)),
        "GPU copy": rate(2 * size, lambda: two.copy_(one)),
        "matmul": rate(2 * wide**3, lambda: torch.mm(matrix, matrix, out=out)),
    }


def measure(
    case: KernelCase, device: torch.device, ceiling: dict[str, float], most_s: float
) -> dict[str, Any]:
    """A case's row; one that fails says why."""
    row: dict[str, Any] = {"kernel": case.kernel, "size": case.size, "ceiling": case.ceiling}
    graph = case.kernel != KMEANS
    try:
        found = time_calls(case.calls, device, most_s=most_s, graph=graph)
        row.update(us=1e6 * found.seconds, how=found.how)
        row.update(_rates(case, found, ceiling))
        if not case.twins:
            return row
        with without_triton():
            twin = time_calls(case.twins, device, most_s=most_s, graph=graph)
        row.update(twin_us=1e6 * twin.seconds, twin_how=twin.how)
    except Exception as error:  # the other kernels are worth having
        row["error"] = _said(error)
    return row


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _rates(case: KernelCase, found: CallTime, ceiling: dict[str, float]) -> dict[str, float]:
    out = {}
    if case.num_bytes:
        out["bytes_per_s"] = case.num_bytes / found.seconds
    if case.flops:
        out["flops_per_s"] = case.flops / found.seconds
    if case.ceiling in ceiling:
        amount = case.flops if case.ceiling == "matmul" else case.num_bytes
        out["of_ceiling"] = amount / found.seconds / ceiling[case.ceiling]
    return out


def kernel_table(figures: dict[str, Any]) -> str:
    """The ceilings, a line for each kernel and size, and k-means beside the prefill."""
    said = ", ".join(
        f"{name} {rate / 1e12:.0f} TFLOP/s" if name == "matmul" else f"{name} {rate / 1e9:.1f} GB/s"
        for name, rate in figures["ceilings"].items()
    )
    lines = []
    for row in figures["rows"]:
        name = f"{row['kernel']}: {row['size']}"
        if "us" not in row:
            lines.append([name, row["error"]])
            continue
        rate = "-"
        if "flops_per_s" in row:
            rate = f"{row['flops_per_s'] / 1e12:.1f} TFLOP/s"
        elif "bytes_per_s" in row:
            rate = f"{row['bytes_per_s'] / 1e9:.1f} GB/s"
        share = f"{row['of_ceiling']:.0%}" if "of_ceiling" in row else "-"
        twin, gain = "-", "-"
        if "twin_us" in row:
            twin, gain = f"{row['twin_us']:.1f}", f"{row['twin_us'] / row['us']:.1f}"
        lines.append([name, f"{row['us']:.1f}", rate, share, twin, gain, row["how"]])
    header = ("kernel: size", "us", "rate", "of ceiling", "twin us", "gain", "how")
    parts = [f"ceilings: {said}", format_table(header, lines)]
    parts += [
        f"k-means, {entry['size']}: {entry['all_layers_s']:.2f} s in {entry['layers']} layers, "
        f"{entry['of_prefill']:.1%} of the prefill ({entry['prefill_s']:.2f} s)"
        for entry in figures.get("clustering", [])
    ]
    return "\n".join(parts)


def _clustering(
    rows: Sequence[dict[str, Any]], config: str, tokens: int, device: torch.device
) -> list[dict[str, Any]]:
    """k-means in all layers as a share of the prefill, reckoned up from one layer's."""
    found = [row for row in rows if row["kernel"] == KMEANS and "us" in row]
    if not found:
        return []
    layers = int(ARCHITECTURES[config](tokens).num_hidden_layers)
    prefill = layers * prefill_layer_s(config, tokens, device)
    return [
        {
            "size": row["size"], "layers": layers, "all_layers_s": layers * row["us"] / 1e6,
            "prefill_s": prefill, "of_prefill": layers * row["us"] / 1e6 / prefill,
        }
        for row in found
    ]  # fmt: skip


def _cases(topic: str, grid: Grid, device: torch.device) -> Cases:
    if topic in ("gather", "append"):
        host = host_buffer(grid, device)
        return (gather_cases if topic == "gather" else append_cases)(grid, host, device)
    return {
        "attention": attention_cases, "selection": selection_cases, "slots": slot_cases,
        "boundaries": boundary_cases, "kmeans": cluster_cases,
    }[topic](grid, device)  # fmt: skip


def run(arguments: Sequence[str]) -> Result:
    """Measure everything that the command line asks for, print it and save it."""
    args = parse_arguments(arguments)
    grid, device = SMALL if args.small else Grid(), torch.device(args.on)
    if args.on == "cuda":
        gc.freeze()  # recording a graph collects garbage: what is there now need not be looked at
    torch.manual_seed(args.seed)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "json", "minutes")}
    result = Result.begin(KIND, arguments, settings, seed=args.seed, package="research")
    sitting, topics = Sitting(result, args), args.topics.split(",")
    progress = Progress(len(topics))
    progress.say("ceilings")
    figures: dict[str, Any] = {"ceilings": ceilings(grid, device), "rows": []}
    result.figures = figures
    for topic in topics:
        if sitting.time_is_up():
            break
        progress.say(topic)
        try:
            for case in _cases(topic, grid, device):
                row = measure(case, device, figures["ceilings"], args.most_seconds)
                figures["rows"].append(row)
            if topic == "kmeans":
                clustering = _clustering(figures["rows"], args.config, grid.tokens, device)
                figures["clustering"] = clustering
        except RuntimeError as error:  # memory that is not there
            figures["rows"].append({"kernel": topic, "size": "all", "error": _said(error)})
        progress.step(1)
        sitting.save()
    return closed(result, args, kernel_table(figures))


if __name__ == "__main__":
    run_program(run)
