"""The model card of a run: `python -m training.model_card training/runs/recall-2`.

Writes `model/README.md` from the run's log, its evaluation, the corpus and the statistics of its
attention, and the curves beside it; of a run that went on with another one's weights, from the logs
of all sittings. Nothing in it but `--notes` is typed by hand: what was not measured is said not to
have been.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, PenstockError
from penstock.evaluate.result import Result
from training import card_prose, card_video
from training.card_recipe import recipes
from training.card_sittings import (
    asked,
    begins_of,
    cannot,
    joined,
    other_seeds,
    read_chain,
    sittings,
)
from training.checkpoint import write_sums
from training.evaluate import decoded, report

_ROWS = 12
_PROSE_ORDER = "; multi_value's in the document's order; common_words, in any order, only decoded"
Record = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the card of one run."""
    parser = argparse.ArgumentParser(prog="python -m training.model_card", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run, with log.jsonl and model/")
    parser.add_argument("--evaluation", type=Path, help="default: evaluation.json in the run")
    parser.add_argument(
        "--statistics", type=Path, help="result of `python -m research.statistics MODEL --out`"
    )
    parser.add_argument("--corpus", type=Path, help="folder that a prose model was trained on")
    parser.add_argument(
        "--other", type=Path, action="append", default=[], metavar="RUN",
        help="the same with another seed, to stand beside it; repeatable",
    )  # fmt: skip
    parser.add_argument("--name", help="of the model (default: the oldest sitting's settings')")
    parser.add_argument("--notes", type=Path, help="Markdown of one's own, put in as it is")
    args = parser.parse_args(arguments)
    try:
        evaluation = args.evaluation or args.run / "evaluation.json"
        write_card(
            args.run, evaluation, statistics=args.statistics, corpus=args.corpus,
            others=args.other, notes=args.notes, name=args.name,
        )  # fmt: skip
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(args.run / "model" / "README.md")
    return 0


def write_card(
    run: Path, evaluation: Path, *, statistics: Path | None = None, corpus: Path | None = None,
    others: Sequence[Path] = (), notes: Path | None = None, name: str | None = None,
) -> None:  # fmt: skip
    """Write `model/README.md`, `model/curves.svg` and the sums of all files anew.

    Args:
        run: folder of a run that has ended.
        evaluation: result of `training.evaluate`, of `training.evaluate_prose` or of
            `training.evaluate_video`; need not exist.
        statistics: result of `python -m research.statistics`.
        corpus: folder that a prose model was trained on.
        others: runs of the same with other seeds.
        notes: Markdown of one's own.
        name: of the model; None: as the oldest sitting's settings have it.

    Raises:
        ConfigError: there is no log or no model in the folder, or a file is not what it should be.
    """
    model = run / "model"
    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} holds no model; train it to its end, or use --export")
    runs, logs = read_chain(run)
    result = Result.load(evaluation) if evaluation.is_file() else None
    measured = None if statistics is None else Result.load(statistics)
    if measured is not None and measured.kind != "statistics":
        raise ConfigError(f"{statistics} is no result of research.statistics")
    try:
        said = "" if notes is None else notes.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {notes}: {error}") from error
    drawn = _draw(joined(logs), model)
    text = card(
        logs, result, _parameters(model), curves=drawn, statistics=measured, corpus=corpus,
        notes=said, came=sittings(runs, logs) if len(runs) > 1 else "", others=other_seeds(others),
        name=name,
    )  # fmt: skip
    (model / "README.md").write_text(text, encoding="utf-8")
    write_sums(model)


def card(
    logs: Sequence[Sequence[Record]], evaluation: Result | None, parameters: int, *, curves: bool,
    statistics: Result | None = None, corpus: Path | None = None, notes: str = "", came: str = "",
    others: str = "", name: str | None = None,
) -> str:  # fmt: skip
    """The card, as Markdown.

    Args:
        logs: of all sittings, the first one's first.
        evaluation: if there is one.
        parameters: of the model.
        curves: whether they are drawn.
        statistics: of its attention.
        corpus: folder that a prose model was trained on.
        notes: Markdown of one's own.
        came: how the sittings followed each other.
        others: what other seeds came to.
        name: of the model; None: as the oldest sitting's settings have it.
    """
    records = joined(logs)
    steps = [record for record in records if record["kind"] == "train"]
    glances = [record for record in records if record["kind"] == "glance"]
    settings = begins_of(records)[0]["settings"]
    prose, video = "corpus" in settings, "vision" in settings
    unable = "" if video else cannot(evaluation)
    parts = [
        f"# {name or settings['name']}",
        _beginning(logs, steps[-1], parameters, prose=prose, video=video),
        *([notes] if notes else []),
        *(["## Text", card_prose.data(corpus)] if prose else []),
        *(["## Perplexity", card_prose.perplexity(evaluation)] if prose else []),
        "## Accuracy",
        card_video.accuracy(evaluation) if video else _accuracy(evaluation, prose=prose),
        *(["## What it does not do", unable] if unable else []),
        *(["## Attention", _attention(statistics)] if statistics is not None else []),
        "## Recipe",
        *([came] if came else []),
        *recipes(logs),
        *(["## The same with other seeds", others] if others else []),
        "## Curves",
        *(["![Loss and accuracy over the run](curves.svg)"] if curves else []),
        _curve_table(steps),
        _glances(glances),
        card_prose.held_back(glances),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _beginning(
    logs: Sequence[Sequence[Record]], last: Record, parameters: int, *, prose: bool, video: bool
) -> str:
    begins = begins_of(joined(logs))
    fit = sum(begins_of(log)[-1].get("fit_minutes") or 0 for log in logs)
    devices = ", ".join(dict.fromkeys(record["device"] for record in begins))
    stages = [stage for log in logs for stage in begins_of(log)[-1]["settings"]["stages"]]
    total = sum(stage["steps"] for stage in stages)
    of = f"steps, fitted into {fit:g} minutes" if fit else f"of {total:,} steps"
    on = "books and technical documents, and on questions about them"
    bench = "text that the tasks of `penstock.evaluate` generate"
    nature = (
        "It is a small language model, made to be measured: it goes on with English prose, and "
        "answers the questions of `penstock.evaluate` about what stands in it. It knows little and "
        "follows no instructions."
        if prose
        else "It is not a language model for people: it answers questions about generated "
        "documents, in the words it was trained on and no others."
    )
    if video:
        bench, nature = "synthetic clips and questions about them", card_video.NATURE
    first = begins[0].get("begun_with")
    start = (
        f"Begun with the weights of {first['model']} (SHA-256 {first['sha256'][:16]}...; what "
        "follows is of this run alone), trained further"
        if first
        else "Trained from random weights"
    )
    return (
        f"{start} on {devices}, on {on if prose else bench}: "
        f"{last['step']:,} {of}, {last['tokens'] / 1e6:,.1f} M tokens, "
        f"{last['trained_s'] / 60:.1f} minutes of training in {len(begins)} sitting(s), "
        f"{begins[0]['date'][:10]}. {parameters / 1e6:.2f} M parameters, bfloat16. Apache-2.0."
        f"\n\n{nature}"
    )


def _accuracy(evaluation: Result | None, *, prose: bool) -> str:
    if evaluation is None:
        return "Not measured."
    cells = evaluation.figures["cells"]
    where = ", held-out prose where a task has prose around its facts" if prose else ""
    text = (
        f"Exact match by task and prompt tokens{where}, full attention, {asked(cells)} fresh "
        f"samples a cell, seed {evaluation.seed}, {evaluation.settings['device']}, the right "
        "answer given (teacher-forced: every token of it the likeliest, `<eos>` included"
        f"{_PROSE_ORDER if prose else ''}).\n\n"
        f"```\n{report(cells)}\n```"
    )
    if any(cell["generated"] for cell in cells):
        line, _, shares = decoded(cells).partition("\n")
        text += f"\n\nThe first samples of each cell decoded as well; {line}.\n\n```\n{shares}\n```"
    return f"{text}\n\nCommand: `{evaluation.command}`, commit {evaluation.commit}."


def _attention(statistics: Result) -> str:
    """Where full attention looks, and what of the papers' premises holds."""
    from research.statistics.program import keys_table, legends, locality_table, premises

    figures = statistics.figures
    locality, keys = legends(figures)
    rows = ", ".join(f"{count:,}" for count in figures["prompt_tokens"])
    lines = "\n".join(f"* {line}" for line in premises(figures))
    return (
        f"Full attention over {rows} tokens of prompt and {figures['steps']} decode steps, by "
        f"layer.\n\n```\n{locality_table(figures)}\n```\n\n{locality}\n\n"
        f"```\n{keys_table(figures)}\n```\n\n{keys}\n\n{lines}\n\n"
        f"Command: `{statistics.command}`, commit {statistics.commit}."
    )


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


def _glances(glances: Sequence[Record]) -> str:
    """Accuracy by task at each glance, means over its lengths."""
    seen = [record for record in glances if record["exact"]]
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
