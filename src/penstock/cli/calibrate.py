"""`penstock calibrate`: make a low-rank adapter for a model from a piece of text."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.cli.generate import DeviceOption, DtypeOption, ModelArgument, check_writable


def calibrate_command(
    model: ModelArgument,
    text: Annotated[
        Path, typer.Option(metavar="FILE", help="UTF-8 text of the kind that will be read.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The adapter, as safetensors.")
    ],
    rank: Annotated[
        int | None, typer.Option(help="Numbers kept per token and layer; chosen when left out.")
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
) -> None:
    """Fit KVSwap's low-rank index to a model.

    The adapter that comes out is for `penstock generate --adapter`.
    """
    from penstock.generation.prompts import make_batch, read_text_file
    from penstock.models.calibrate import calibrate
    from penstock.models.loader import load

    console = Console(stderr=True, highlight=False)
    check_writable(output, "--output")
    content = read_text_file(text, "text file")
    loaded = load(model, dtype=None if dtype is None else dtype.value, device=device)
    batch = make_batch(loaded, [content], new_tokens=0, pad_token_id=0)
    calibrate(loaded.model, batch.input_ids, rank=rank, path=output)
    console.print(f"adapter for {model} from {batch.padded_tokens:,} tokens: {output}")
