"""Options of the commands that load a model by name."""

from typing import Annotated

import typer

RevisionOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Of a model on the hub: a branch, a tag or a commit."),
]
OfflineOption = Annotated[
    bool,
    typer.Option(
        "--offline", help="Take the model from this machine alone; HF_HUB_OFFLINE does the same."
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that comes with the model (never otherwise)."
    ),
]
