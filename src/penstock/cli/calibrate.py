"""`penstock calibrate`: make a low-rank adapter for a model from text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.console import PlainConsole
from penstock.cli.loading import ModelSource, load_model
from penstock.cli.model_options import OfflineOption, RevisionOption, TrustOption
from penstock.cli.options import DeviceOption, DtypeOption, ModelArgument
from penstock.cli.output_file import ForceOption, check_writable, written

if TYPE_CHECKING:
    from penstock.engine.adapter import LowRankAdapter

TOLD_RANK = 32
"""The mean rank whose division among the layers is told: what a tight budget takes."""


def calibrate_command(
    model: ModelArgument,
    text: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="UTF-8 text of the kind that will be read; repeatable."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The adapter, as safetensors.")
    ],
    rank: Annotated[
        int | None,
        typer.Option(help="Components kept per token and layer; at most 128 by default."),
    ] = None,
    window: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            help="Longest piece that is read at once; never more than the model has positions.",
        ),
    ] = 8192,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    revision: RevisionOption = None,
    offline: OfflineOption = False,
    trust_remote_code: TrustOption = False,
    force: ForceOption = False,
) -> None:
    """Fit KVSwap's low-rank index to a model.

    The adapter that comes out is for `penstock generate --adapter`.
    """
    import torch

    from penstock.cli.screen import TokenProgress
    from penstock.core.errors import ConfigError, PromptError
    from penstock.engine.adapter import ADAPTER
    from penstock.generation.prompts import encode, read_text_file
    from penstock.models.calibrate import calibrate
    from penstock.models.model_shape import inspect_model

    console = PlainConsole(stderr=True)
    if window < 2:
        raise ConfigError(f"--window {window} must be at least 2 tokens")
    check_writable(output, "--output", ADAPTER, force=force)
    contents = [read_text_file(path, "text file") for path in text]
    source = ModelSource(revision, offline, trust_remote_code)
    loaded = load_model(console, model, dtype=dtype, device=device, source=source)
    texts = [torch.tensor(encode(loaded, content)) for content in contents]
    for path, tokens in zip(text, texts, strict=True):
        if len(tokens) == 0:
            raise PromptError(f"text file {path} is empty: it has zero tokens")
    positions = inspect_model(loaded.model).max_positions
    if positions < min(window, max(map(len, texts))):
        console.print(
            f"note: {model} has {positions:,} positions, so that no piece is longer",
            soft_wrap=True,
        )
    with TokenProgress(console, "calibrate") as progress:
        adapter = calibrate(
            loaded.model, texts, rank=rank, window_tokens=window, progress=progress.update
        )
    written(adapter.save, output, "the adapter")
    told = told_ranks(adapter)
    console.print(
        f"adapter of rank {adapter.rank} for {model}, from {adapter.tokens:,} tokens: {output}"
        + told,
        soft_wrap=True,
    )


def told_ranks(adapter: "LowRankAdapter") -> str:
    """How the layers share a rank that a plan may choose; nothing where they share it evenly."""
    mean = min(TOLD_RANK, adapter.rank)
    ranks = [layer.rank_at(mean) for layer in adapter.shared_layers()]
    if len(set(ranks)) == 1:
        return ""
    return f"\nby what each layer needs, rank {mean} is {' '.join(map(str, ranks))}"
