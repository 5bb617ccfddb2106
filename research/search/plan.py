"""`python -m research.search.plan`: what each step of a request loads, by the equations.

Source: Locality-Aware Beam Scheduling, section 4.1, Eq. 1-5, Table 1 and Fig. 7. Nothing runs; the
conventions are those of `penstock.search.transfer_model`.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from penstock.core.byte_size import parse_bytes
from penstock.evaluate.entry import run_program
from penstock.evaluate.number_lists import whole_numbers
from penstock.evaluate.options import read_options
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from penstock.evaluate.text_table import format_table
from penstock.models.kv_shapes import kv_shape
from penstock.search.transfer_model import (
    CONVENTIONS,
    TransferRequest,
    Transfers,
    step_by_step,
    token_by_token,
)

KIND = "search.plan"
FIG_7_GIB = {0: 53012, 32: 2052, 64: 1044, 128: 540}
"""What the paper says for OPT-6.7B, 64 beams and 7 GiB, by tokens of a step; 0: token by token."""
FIG_7_CONVENTION = "paper-figure"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m research.search.plan", description=__doc__)
    add = parser.add_argument
    add("--model", default="opt-6.7b", help="a known model's name, or a folder")
    add("--dtype", help="default: the model's")
    add("--beams", type=int, default=64)
    add("--steps", default="32,64,128", help="tokens of a step")
    add("--prompt-tokens", type=int, default=128)
    add("--tokens", type=int, default=1920)
    add("--memory", default="7GiB")
    return read_options(parser, arguments, seed=False, resume=False, minutes=False)


def run(arguments: Sequence[str]) -> Result:
    """Compute, print the totals, save the result."""
    args = parse_arguments(arguments)
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "json")}
    settings["model"] = args.model.rstrip("/").rpartition("/")[2]
    result = Result.begin(KIND, arguments, settings, seed=0, package="research")
    requests = [
        TransferRequest.of_shape(
            kv_shape(args.model, args.dtype), beams=args.beams, width=1, step_tokens=tokens,
            prompt_tokens=args.prompt_tokens, new_tokens=args.tokens,
            memory_bytes=parse_bytes(args.memory),
        )
        for tokens in whole_numbers(args.steps, "--steps")
    ]  # fmt: skip
    rows = [_row(requests[0], 0, None, token_by_token(requests[0]))]
    rows += [
        _row(request, request.step_tokens, name, step_by_step(request, name))
        for name in CONVENTIONS for request in requests
    ]  # fmt: skip
    result.figures = {"rows": rows}
    return closed(result, args, plan_table(rows))


def _row(
    request: TransferRequest, step_tokens: int, convention: str | None, made: Transfers
) -> dict[str, Any]:
    """`step_tokens` is 0 token by token; that row is added up over the first request's steps."""
    each = made if step_tokens else made.add_up(request.step_tokens)
    return {
        "step_tokens": step_tokens, "convention": convention, "total_bytes": made.total_bytes,
        "added_over": step_tokens or request.step_tokens,
        "starts": each.starts.tolist(), "loaded_bytes": each.loaded_bytes.tolist(),
        "groups": each.groups.tolist(),
    }  # fmt: skip


def plan_table(rows: Sequence[dict[str, Any]]) -> str:
    """Totals in GiB, each beside what the paper's figure says for its own request."""
    base = rows[0]["total_bytes"]
    lines = [
        [
            f"steps of {row['step_tokens']}" if row["step_tokens"] else "token by token",
            row["convention"] or "Eq. 1-3", f"{row['total_bytes'] / 2**30:,.0f}",
            f"{row['total_bytes'] / base:.2%}" if base else "-", str(max(row["groups"])),
        ]
        for row in rows
    ]  # fmt: skip
    return format_table(("strategy", "convention", "GiB", "share", "groups"), lines)


if __name__ == "__main__":
    run_program(run)
