"""`penstock fetch`: get a released model that is too large for the package."""

import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.console import say
from penstock.core.errors import ConfigError

_SAY_S = 1.0


def fetch_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A released model.")],
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="URL|FILE|DIR",
            help="The archive, or a folder that holds it (default: the model's own address).",
        ),
    ] = "",
    to: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The model's new folder (default: the user's data)."),
    ] = None,
) -> None:  # fmt: skip
    """Fetch a released model; its name can then be given wherever a model folder can.

    What was downloaded is checked before it is unpacked; a download that was broken off goes on.
    """
    from penstock.cli.generate import in_home
    from penstock.models.fetch import fetch
    from penstock.models.released import released_model

    released = released_model(name)
    target = released.folder if to is None else in_home(to, "--to")
    if to is None and released.is_fetched:
        say(f"{name} is there already: {target}")
        return
    if to is not None and not target.absolute().parent.is_dir():
        raise ConfigError(
            f"--to {to}: there is no folder {target.parent}; make it first (mkdir -p)"
        )
    fetch(released, target, source=source, on_bytes=_Said())
    known = name if to is None else str(target)
    say(f"{name}: {target}\ntry it: penstock generate {known} --prompt-file FILE")


class _Said:
    """Says now and then how far a fetch has come."""

    def __init__(self) -> None:
        self._said_s = time.perf_counter()

    def __call__(self, what: str, done: int, total: int) -> None:
        now_s = time.perf_counter()
        if now_s - self._said_s < _SAY_S:
            return
        self._said_s = now_s
        say(f"{what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB ({done / total:.0%})", err=True)
