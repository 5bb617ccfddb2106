"""The model card of a run: `python -m training.model_card training/runs/recall-2`.

Writes `model/README.md` from the run's log and evaluation, and the curves beside it. Nothing in
it is typed by hand: what was not measured is said not to have been.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.bench.result import Result
from penstock.core.errors import ConfigError, PenstockError
from training.checkpoint import write_sums
from training.evaluate import table

_ROWS = 12
Record = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the card of one run."""
    parser = argparse.ArgumentParser(prog="python -m training.model_card", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run, with log.jsonl and model/")
    parser.add_argument("--evaluation", type=Path, help="default: evaluation.json in the run")
    args = parser.parse_args(arguments)
    try:
        write_card(args.run, args.evaluation or args.run / "evaluation.json")
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.run / "model" / "README.md")
    return 0


def write_card(run: Path, evaluation: Path) -> None:
    """Write `model/README.md`, `model/curves.svg` and the sums of all files anew.

    Args:
        run: folder of a run that has ended.
        evaluation: result of `training.evaluate`; need not exist.

    Raises:
        ConfigError: there is no log or no model in the folder.
    """
    model = run / "model"
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} holds no model; train it to its end, or use --export")
    records = read_log(run / "log.jsonl")
    result = Result.load(evaluation) if evaluation.is_file() else None
    drawn = _draw(records, model)
    text = card(records, result, _parameters(model), curves=drawn)
    (model / "README.md").write_text(text, encoding="utf-8")
    write_sums(model)


def read_log(path: Path) -> list[dict[str, Any]]:
    """All whole records of a run's log.

    Raises:
        ConfigError: it is missing or has no step.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not any(record["kind"] == "train" for record in records):
        raise ConfigError(f"{path} has no training step; train first")
    return records


def card(
    records: Sequence[Record], evaluation: Result | None, parameters: int, *, curves: bool
) -> str:
    """The card, as Markdown."""
    begins = [record for record in records if record["kind"] == "begin"]
    steps = [record for record in records if record["kind"] == "train"]
    settings, last = begins[-1]["settings"], steps[-1]
    total = sum(stage["steps"] for stage in settings["stages"])
    devices = ", ".join(dict.fromkeys(record["device"] for record in begins))
    parts = [
        f"# {settings['name']}",
        (
            f"Trained from random weights on {devices}, on text that the tasks of `penstock.bench` "
            f"generate: {last['step']:,} of {total:,} steps, {last['tokens'] / 1e6:,.1f} M tokens, "
            f"{last['trained_s'] / 60:.1f} minutes of training in {len(begins)} sitting(s), "
            f"{begins[0]['date'][:10]}. {parameters / 1e6:.2f} M parameters, bfloat16. Apache-2.0."
        ),
        (
            "It is not a language model for people: it answers questions about generated "
            "documents, in the words it was trained on and no others."
        ),
        "## Accuracy",
        _accuracy(evaluation),
        "## Recipe",
        _recipe(settings, begins[-1]),
        "## Curves",
        *(["![Loss and accuracy over the run](curves.svg)"] if curves else []),
        _curve_table(steps),
        _glances(records),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _accuracy(evaluation: Result | None) -> str:
    if evaluation is None:
        return "Not measured."
    cells = evaluation.figures["cells"]
    asked = [cell["asked"] for cell in cells if cell["asked"]]
    counts = f"{min(asked)} to {max(asked)}" if asked else "no"
    text = (
        f"Exact match by task and prompt tokens, full attention, {counts} fresh samples a cell, "
        f"seed {evaluation.seed}, {evaluation.settings['device']}, the right answer given "
        "(teacher-forced: every token of it the likeliest, `<eos>` included).\n\n"
        f"```\n{table(cells)}\n```"
    )
    generated = sum(cell["generated"] for cell in cells)
    if generated:
        exact = sum(cell["generated_exact"] for cell in cells)
        text += f"\n\nGreedy decoding of {generated} of these samples: {exact} exact."
    return f"{text}\n\nCommand: `{evaluation.command}`, commit {evaluation.commit}."


def _recipe(settings: Record, begin: Record) -> str:
    model, plan, rows = settings["model"], settings["optimizer"], settings["rows"]
    stages = "; ".join(
        f"{stage['steps']:,} steps of {', '.join(f'{n:,}' for n in stage['lengths'])}"
        for stage in settings["stages"]
    )
    mix = ", ".join(f"{task} {share:.2f}" for task, share in settings["mix"].items())
    batch = settings["micro_batch_tokens"] * settings["micro_batches"]
    lines = [
        (
            f"Qwen3: {model['layers']} layers, hidden {model['hidden']}, {model['heads']} query "
            f"and {model['kv_heads']} KV heads of {model['head_dim']}, feed-forward "
            f"{model['feed_forward']}, RoPE theta {model['rope_theta']:g}, "
            f"{model['positions']:,} positions, tied embeddings."
        ),
        f"{batch:,} tokens a step. Rows: {stages}.",
        f"Mix: {mix}.",
        (
            f"Muon {plan['matrix_rate']} (momentum {plan['matrix_momentum']}, decay "
            f"{plan['matrix_decay']}) on matrices, AdamW {plan['other_rate']} on the rest; "
            f"{plan['warmup_steps']} steps of warm-up, linear decay over the last "
            f"{plan['decay_steps']:,}."
        ),
        (
            f"Loss on answers, weighed as {rows['answer_floor']:g} to {rows['answer_cap']:g} "
            f"tokens each; {rows['other_weight']} on {rows['other_share']:.1%} of the other "
            f"tokens. {rows['jump_share']:.0%} of the rows below {rows['jump_below']:,} tokens "
            f"have up to {rows['jumps']} jumps in their positions."
        ),
        f"Seed {settings['seed']}, commit {begin['commit']}.",
    ]
    return "\n".join(f"* {line}" for line in lines)


def _curve_table(steps: Sequence[Record]) -> str:
    """A few steps of the run, evenly spread, as a table."""
    count = min(_ROWS, len(steps))
    picked = [steps[round(at * (len(steps) - 1) / max(1, count - 1))] for at in range(count)]
    lines = ["| step | M tokens | rows up to | loss | Mtok/s |", "| ---: " * 5 + "|"]
    lines += [
        f"| {one['step']:,} | {one['tokens'] / 1e6:,.1f} | {one['longest']:,} | "
        f"{one['loss']:.4f} | {one['tokens_per_s'] / 1e6:.3f} |"
        for one in picked
    ]
    return "\n".join(lines)


def _glances(records: Sequence[Record]) -> str:
    """Accuracy by task at each glance, means over its lengths."""
    seen = [record for record in records if record["kind"] == "glance" and record["exact"]]
    if not seen:
        return ""
    tasks = list(dict.fromkeys(one["task"] for record in seen for one in record["exact"]))
    lines = [
        "Exact match during training, means over lengths, a few samples each:",
        "",
        f"| step | {' | '.join(tasks)} |",
        "| ---: " * (len(tasks) + 1) + "|",
    ]
    for record in seen:
        row = [[o["exact"] for o in record["exact"] if o["task"] == task] for task in tasks]
        shown = [f"{sum(cell) / len(cell):.2f}" if cell else "-" for cell in row]
        lines.append(f"| {record['step']:,} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _draw(records: Sequence[Record], folder: Path) -> bool:
    """Draw the curves, if matplotlib is installed."""
    try:
        from training.curves import draw
    except ImportError:
        return False
    draw(records, folder / "curves.svg")
    return True


def _parameters(model: Path) -> int:
    """Numbers in the model's weights."""
    from safetensors import safe_open

    total = 0
    with safe_open(model / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118  (it is no mapping)
            size = 1
            for length in weights.get_slice(name).get_shape():
                size *= length
            total += size
    return total


if __name__ == "__main__":
    sys.exit(main())
