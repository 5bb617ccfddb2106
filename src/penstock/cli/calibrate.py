"""`penstock calibrate`: make a low-rank adapter for a model from text."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.cli.generate import DeviceOption, DtypeOption, ModelArgument, check_writable


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
        int, typer.Option(metavar="TOKENS", help="Longest piece that is read at once.")
    ] = 8192,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
) -> None:
    """Fit KVSwap's low-rank index to a model.

    The adapter that comes out is for `penstock generate --adapter`.
    """
    import torch

    from penstock.cli.screen import TokenProgress
    from penstock.core.errors import ConfigError, PromptError, StorageError
    from penstock.generation.prompts import encode, read_text_file
    from penstock.models.calibrate import calibrate
    from penstock.models.loader import load

    console = Console(stderr=True, highlight=False, markup=False)
    if window < 2:
        raise ConfigError(f"--window {window} must be at least 2 tokens")
    check_writable(output, "--output")
    contents = [read_text_file(path, "text file") for path in text]
    loaded = load(model, dtype=None if dtype is None else dtype.value, device=device)
    texts = [torch.tensor(encode(loaded, content)) for content in contents]
    for path, tokens in zip(text, texts, strict=True):
        if len(tokens) == 0:
            raise PromptError(f"text file {path} is empty: it has zero tokens")
    with TokenProgress(console, "calibrate") as progress:
        adapter = calibrate(
            loaded.model, texts, rank=rank, window_tokens=window, progress=progress.update
        )
    try:
        adapter.save(output)
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror or error}") from error
    console.print(
        f"adapter of rank {adapter.rank} for {model}, from {adapter.tokens:,} tokens: {output}",
        soft_wrap=True,
    )
