"""`python -m research.index_study MODEL ...`: what compact indexes find of a model's attention."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.engine.policy import Rotary
from penstock.evaluate.options import read_options
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result
from penstock.evaluate.sitting import closed
from penstock.evaluate.text_table import format_table
from penstock.kernels.key_rotation import KeyRotation
from penstock.models.key_rotations import key_rotations
from penstock.models.loader import LoadedModel, load
from penstock.models.model_shape import inspect_model
from research.clusters.recording import model_name
from research.index_study.indexes import Indexes
from research.index_study.layer import GROUP_TOKENS, GROUPS, SINK_TOKENS, WINDOW_TOKENS, Layer
from research.index_study.recording import ASKED, Recording, record, rotary_by_halves
from research.index_study.texts import text_named, tokens_of_text

Row = dict[str, Any]
"""One index on one text of one model: family, size, mass by layer."""
_CURVE = "another text's"
"""The family by which components are divided among the layers."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: a number or a text makes no sense.
    """
    parser = argparse.ArgumentParser(prog="python -m research.index_study", description=__doc__)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="folders of models")
    add(
        "--text", action="append", metavar="NAME", dest="texts",
        help="prose, code, or NAME=FILE; each is the next one's other text (prose and code)",
    )  # fmt: skip
    add("--tokens", type=int, default=12_288, help="of a prompt; fewer where a model has no more")
    add("--device", default="cpu", help="that reads the texts: cpu or cuda")
    add("--every", type=int, default=1, help="measure one layer in so many")
    args = read_options(parser, arguments, seed=False, resume=False, minutes=False)
    args.texts = args.texts or ["prose", "code"]
    if args.tokens < 1024 or args.every < 1:
        raise ConfigError("--tokens must be at least 1024 and --every at least 1")
    for text in args.texts:
        text_named(text)
    return args


def run(arguments: Sequence[str]) -> Result:
    """Record the texts, ask every index, print the tables and save the result."""
    args = parse_arguments(arguments)
    settings = {
        "models": [model_name(model) for model in args.models],
        "texts": [text.partition("=")[0] for text in args.texts],
        "tokens": args.tokens, "every": args.every, "queries": ASKED, "groups": GROUPS,
        "group_tokens": GROUP_TOKENS, "sink_tokens": SINK_TOKENS, "window_tokens": WINDOW_TOKENS,
    }  # fmt: skip
    shown = [_public(word, args) for word in arguments]
    result = Result.begin("index_study", shown, settings, seed=0, package="research")
    result.figures = {"models": []}
    for folder in args.models:
        result.figures["models"].append(
            _study(load(folder, device=args.device), model_name(folder), args)
        )
        if args.out:
            result.save(args.out)
    return closed(result, args, report(result))


def _public(word: str, args: argparse.Namespace) -> str:
    """A word of the command line without paths."""
    if word in args.models:
        return model_name(word)
    for text in args.texts:
        name, given, _ = text.partition("=")
        if given and word.endswith(text):
            return f"{word.removesuffix(text)}{name}=PATH"
    return word


def _study(loaded: LoadedModel, name: str, args: argparse.Namespace) -> Row:
    shape = inspect_model(loaded.model)
    rotary, rotations = rotary_by_halves(loaded), key_rotations(loaded.model, shape)
    total = min(args.tokens + ASKED, shape.max_positions)
    reading = Progress(total * len(args.texts))
    recordings = []
    for text in args.texts:
        ids = tokens_of_text(loaded, text, total)
        recordings.append(record(loaded, ids, reading.up_to(f"{name} reads")))
    layers = range(0, len(shape.tiered_layers), args.every)
    asking = Progress(len(layers) * len(args.texts))
    texts = []
    for number, text in enumerate(args.texts):
        mine, other = recordings[number], recordings[(number + 1) % len(recordings)]
        rows: dict[str, Row] = {}
        for layer in layers:
            with torch.no_grad():
                one, two = (_layer(each, layer, rotary, rotations[layer]) for each in (mine, other))
                _ask(rows, one, two)
            asking.add(f"{name}, {text.partition('=')[0]}", 1)
        texts.append({"text": text.partition("=")[0], "rows": list(rows.values())})
    _divide_by_layer(texts)
    return {
        "model": name, "tokens": total - ASKED, "layers": [shape.tiered_layers[i] for i in layers],
        "kv_heads": shape.kv.num_kv_heads, "head_dim": shape.kv.head_dim, "texts": texts,
    }  # fmt: skip


def _layer(
    recording: Recording, number: int, rotary: Rotary, rotation: KeyRotation | None
) -> Layer:  # fmt: skip
    return Layer(
        keys=recording.keys[number], asked=recording.asked[number], kept=recording.kept[number],
        places=recording.places, scaling=recording.scaling, rotary=rotary,
        rotation=rotation,
    )  # fmt: skip


def _ask(rows: dict[str, Row], layer: Layer, other: Layer) -> None:
    """Add what each index finds in one layer."""

    def put(family: str, size: float | None, mass: float) -> None:
        name = family if size is None else f"{family}, {size:g} B"
        row = rows.setdefault(name, {"family": family, "size": size, "layers": []})
        row["layers"].append(mass)

    truth = layer.truth()
    put("outside of sinks and window", None, truth.outside)
    put("oracle", None, truth.captured(truth.groups))
    put("exact keys", None, truth.captured(layer.scores(layer.keys)))
    put("exact keys, exponentials added", None, truth.captured(layer.scores(layer.keys, add=True)))
    for index in Indexes(layer, truth, other):
        put(index.family, index.size, truth.captured(index.scores()))


def _divide_by_layer(texts: Sequence[Row]) -> None:
    """Add an index whose columns are divided among the layers by what another text says.

    The next `COLUMNS` go to the layer that finds most by them on the other text, until the layers
    have as many as they would have in equal parts.
    """
    curves = [_curve(each["rows"], _CURVE) for each in texts]
    for number, text in enumerate(texts if len(texts) > 1 else ()):
        other, mine = curves[(number + 1) % len(texts)], _curve(text["rows"], "chosen")
        for parts, size in enumerate(sorted(mine)[:-1], start=1):
            taken = _taken(list(other.values()), parts)
            found = list(mine.values())
            layers = [found[count - 1][layer] for layer, count in enumerate(taken)]
            text["rows"].append(
                {"family": "columns divided by layer", "size": size, "layers": layers}
            )


def _curve(rows: Sequence[Row], family: str) -> dict[float, list[float]]:
    """Mass by layer of a family's sizes, ascending."""
    return {row["size"]: row["layers"] for row in rows if row["family"] == family}


def _taken(found: Sequence[Sequence[float]], parts: int) -> list[int]:
    """Parts of each layer when the layers have `parts` on average.

    Args:
        found: mass with 1, 2, ... parts. [parts][layers]
    """
    layers = len(found[0])
    taken = [1] * layers
    for _ in range((parts - 1) * layers):
        gains = [
            found[taken[i]][i] - found[taken[i] - 1][i] if taken[i] < len(found) else -1.0
            for i in range(layers)
        ]
        taken[gains.index(max(gains))] += 1
    return taken


# Tables -------------------------------------------------------------------------------------------


def report(result: Result) -> str:
    """A table for each model: what each index finds, mean over the layers, and the worst."""
    parts = []
    for model in result.figures["models"]:
        names = [each["text"] for each in model["texts"]]
        header = ["index", "bytes", *(word for name in names for word in (name, "worst"))]
        by_name: dict[tuple[str, float | None], list[str]] = {}
        for text in model["texts"]:
            for row in text["rows"]:
                cells = by_name.setdefault((row["family"], row["size"]), [])
                cells += [f"{mean_of(row):.3f}", f"{min(row['layers']):.3f}"]
        rows = [
            [family, "" if size is None else f"{size:g}", *cells]
            for (family, size), cells in by_name.items()
        ]
        title = f"{model['model']}, {model['tokens']:,} tokens, {len(model['layers'])} layers"
        parts.append(f"{title}\n\n{format_table(header, rows)}")
    return "\n\n".join(parts)


def mean_of(row: Row) -> float:
    """Over the layers."""
    return float(sum(row["layers"]) / len(row["layers"]))
