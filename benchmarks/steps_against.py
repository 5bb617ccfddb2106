"""Step times of this checkout against another one, in turn in one run.

    python -m benchmarks.steps_against ../former --out benchmarks/results/steps-against.json

Both decode over the same synthetic document, in blocks of a few steps after each other. Which
process is started first may count for some percent, so both orders are run; the ratio is the
geometric mean of the two. Former checkouts may call the package's bench `penstock.bench`.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROWS = ("kvswap", "kvswap, no reuse")
WARM_STEPS = 16


def serve(config: str, context: int, steps: int, store: str) -> None:
    """Decode so many steps of a row whenever a line of stdin asks; times in seconds to stdout."""
    import torch

    package = "penstock.evaluate" if find_spec("penstock.evaluate") else "penstock.bench"
    loop, rows = (import_module(f"{package}.{part}") for part in ("decode_loop", "throughput_rows"))
    opened = import_module(f"{package}.bench_model").open_model(
        config, max_positions=context + steps + 64, seed=0
    )
    shape = import_module("penstock.models.model_shape").inspect_model(opened.model).kv
    synthetic = import_module("penstock.workloads.synthetic_kv").SyntheticKV
    bench = loop.Bench(
        model=opened.model, adapter=opened.adapter, context=context, batch=1, memory="1/13",
        document=synthetic(shape, 1, torch.device("cpu"), 0), new_tokens=steps + 32,
    )  # fmt: skip
    known = {row.name: row for row in rows.all_rows([rows.REAL])}
    live = {name: loop.LiveRow(known[name], bench, store) for name in ROWS}
    print("ready", flush=True)
    for line in sys.stdin:
        name, count = json.loads(line)
        times = []
        for _ in range(count):
            began = time.perf_counter()
            live[name]._step()
            times.append(time.perf_counter() - began)
        print(json.dumps(times), flush=True)


def blocks(
    sources: Sequence[Path], args: argparse.Namespace
) -> dict[str, list[list[float]]]:  # fmt: skip
    """Median step of each block by row, in milliseconds, for each source. [sources][blocks]"""
    total = (args.rounds + 1) * args.steps + WARM_STEPS
    options = [args.config, str(args.context), str(total)]
    found: dict[str, list[list[float]]] = {name: [[] for _ in sources] for name in ROWS}
    with tempfile.TemporaryDirectory(dir=args.store) as store:
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--serve", *options, store], text=True,
                env=os.environ | {"PYTHONPATH": str(source)}, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for source in sources
        ]  # fmt: skip
        try:
            for process in processes:
                if _asked(process, None) != "ready":
                    sys.exit("a checkout cannot decode; its error stands above")
            for name in ROWS:
                for number in range(-1, args.rounds):
                    order = range(len(sources))
                    for which in order if number % 2 else reversed(order):
                        count = WARM_STEPS if number < 0 else args.steps
                        times = json.loads(_asked(processes[which], [name, count]))
                        if number >= 0:  # the first step behind the other's block is a cold one
                            found[name][which].append(1e3 * statistics.median(times[1:]))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return found


def _asked(process: "subprocess.Popen[str]", question: Any) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    if question is not None:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both orders, print the ratios and save them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("former", type=Path, help="the other checkout, its kernels compiled")
    parser.add_argument("--config", default="recall", help="a known architecture, or a model")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=80, help="blocks of each checkout and order")
    parser.add_argument("--steps", type=int, default=8, help="steps of a block")
    parser.add_argument("--store", type=Path, help="a folder on the disk (the temporary one)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    from penstock.evaluate.result import Result

    said = [word for word in sys.argv[1:] if word != str(args.former)]
    result = Result.begin("steps_against", said, vars(args), seed=0, package="benchmarks")
    former, ours = args.former.resolve() / "src", ROOT / "src"
    commit = subprocess.run(
        ["git", "-C", args.former, "rev-parse", "--short=12", "HEAD"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    result.settings = {
        "config": args.config, "context": args.context, "rounds": args.rounds, "memory": "1/13",
        "steps": args.steps, "former": commit,
    }  # fmt: skip
    first, second = blocks([former, ours], args), blocks([ours, former], args)
    figures = {}
    for name in ROWS:
        pairs = [(ours_ms, former_ms) for former_ms, ours_ms in zip(*first[name], strict=True)]
        ratios = [statistics.median(a / b for a, b in pairs)]
        ratios.append(statistics.median(a / b for a, b in zip(*second[name], strict=True)))
        figures[name] = {
            "ratio": math.sqrt(math.prod(ratios)), "ratios": ratios,
            "ours_ms": statistics.median([*first[name][1], *second[name][0]]),
            "former_ms": statistics.median([*first[name][0], *second[name][1]]),
        }  # fmt: skip
        one = figures[name]
        print(f"{name}: {one['former_ms']:.2f} ms before, {one['ours_ms']:.2f} ms now, ratio "
              f"{one['ratio']:.3f} ({ratios[0]:.3f} and {ratios[1]:.3f})")  # fmt: skip
    result.figures = {"rows": figures}
    if args.out:
        result.save(args.out)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        sys.exit()
    sys.exit(main())
