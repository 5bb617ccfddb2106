"""`penstock calibrate`: make a low-rank adapter for a model from text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.console import PlainConsole
from penstock.cli.loading import ModelSource, load_model
from penstock.cli.model_options import OfflineOption, RevisionOption, TrustOption
from penstock.cli.options import DeviceOption, DtypeOption, ModelArgument, WeightsOption
from penstock.cli.output_file import ForceOption, check_writable, written

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.engine.adapter import LowRankAdapter
    from penstock.models.loader import LoadedModel

TOLD_RANK = 32
"""The mean rank whose division among the layers is told: what a tight budget takes."""
SHIPPED_TOKENS = 4096
"""Of each text that ships with the package, unless a window is given."""

TextsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--text", metavar="FILE",
        help="UTF-8 text of the kind that will be read; repeatable. Default: prose, code and "
        "dialogue that ship with Penstock.",
    ),
]  # fmt: skip
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE",
        help="The adapter, as safetensors. Default: where the model finds it by itself.",
    ),
]  # fmt: skip
RankOption = Annotated[
    int | None,
    typer.Option(help="Components kept per token and layer; at most 128 by default."),
]
WindowOption = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Longest piece that is read at once; never more than the model has positions.",
        show_default="8192 of a file, 4096 of each text that ships",
    ),
]


def calibrate_command(
    model: ModelArgument,
    text: TextsOption = None, output: OutputOption = None, rank: RankOption = None,
    window: WindowOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    revision: RevisionOption = None,
    offline: OfflineOption = False,
    trust_remote_code: TrustOption = False,
    force: ForceOption = False,
) -> None:  # fmt: skip
    """Fit KVSwap's low-rank index to a model.

    Without --output, every later command finds the adapter by itself: it is kept in your data
    folder, under the model's fingerprint.
    """
    from penstock.cli.screen import TokenProgress
    from penstock.core.errors import ConfigError
    from penstock.engine.adapter import ADAPTER
    from penstock.generation.prompts import read_text_file
    from penstock.models.calibrate import DEFAULT_WINDOW_TOKENS, calibrate

    console = PlainConsole(stderr=True)
    if window is not None and window < 2:
        raise ConfigError(f"--window {window} must be at least 2 tokens")
    if output is not None:
        check_writable(output, "--output", ADAPTER, force=force)
    contents = {str(path): read_text_file(path, "text file") for path in text or ()}
    source = ModelSource(revision, offline, trust_remote_code)
    loaded = load_model(console, model, dtype=dtype, weights=weights, device=device, source=source)
    target = output or _own_place(loaded, force=force)
    window = window or (DEFAULT_WINDOW_TOKENS if contents else SHIPPED_TOKENS)
    texts = _encoded(loaded, contents) if contents else _shipped(console, loaded, window)
    _tell_positions(console, loaded, min(window, max(map(len, texts))))
    with TokenProgress(console, "calibrate") as progress:
        adapter = calibrate(
            loaded.model, texts, rank=rank, window_tokens=window, progress=progress.update
        )
    written(adapter.save, target, "the adapter")
    console.print(
        f"adapter of rank {adapter.rank} for {model}, from {adapter.tokens:,} tokens: {target}"
        + told_ranks(adapter),
        soft_wrap=True,
    )


def _tell_positions(console: PlainConsole, loaded: "LoadedModel", longest: int) -> None:
    from penstock.models.model_shape import inspect_model

    positions = inspect_model(loaded.model).max_positions
    if positions < longest:
        console.print(
            f"note: {loaded.name} has {positions:,} positions, so that no piece is longer",
            soft_wrap=True,
        )


def _own_place(loaded: "LoadedModel", *, force: bool) -> Path:
    """Where the model finds its adapter by itself."""
    from penstock.core.errors import StorageError
    from penstock.engine.adapter import ADAPTER
    from penstock.models.bundled_adapter import calibrated_adapter
    from penstock.models.fingerprint import fingerprint

    place = calibrated_adapter(fingerprint(loaded.model))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {place.parent}: {error.strerror or error}") from error
    check_writable(place, "--output", ADAPTER, force=force)
    return place


def _encoded(loaded: "LoadedModel", contents: dict[str, str]) -> "list[Tensor]":
    import torch

    from penstock.core.errors import PromptError
    from penstock.generation.prompts import encode

    texts = [torch.tensor(encode(loaded, content)) for content in contents.values()]
    for path, tokens in zip(contents, texts, strict=True):
        if len(tokens) == 0:
            raise PromptError(f"text file {path} is empty: it has zero tokens")
    return texts


def _shipped(console: PlainConsole, loaded: "LoadedModel", tokens: int) -> "list[Tensor]":
    from penstock.models.model_shape import inspect_model
    from penstock.tuner.shipped_texts import shipped_texts

    kinds = shipped_texts(loaded, min(tokens, inspect_model(loaded.model).max_positions))
    told = ", ".join(f"{len(ids):,} tokens of {kind}" for kind, ids in kinds.items())
    console.print(f"reading texts that ship with Penstock: {told}", soft_wrap=True)
    return list(kinds.values())


def told_ranks(adapter: "LowRankAdapter") -> str:
    """How the layers share a rank that a plan may choose; nothing where they share it evenly."""
    mean = min(TOLD_RANK, adapter.rank)
    ranks = [layer.rank_at(mean) for layer in adapter.shared_layers()]
    if len(set(ranks)) == 1:
        return ""
    return f"\nby what each layer needs, rank {mean} is {' '.join(map(str, ranks))}"
