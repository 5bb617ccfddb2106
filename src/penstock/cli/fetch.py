"""`penstock fetch`: get a released model, or a model of the Hugging Face hub, ahead of its use."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.console import PlainConsole, say
from penstock.cli.loading import BytesProgress
from penstock.cli.model_options import RevisionOption, TrustOption
from penstock.core.byte_size import format_bytes
from penstock.core.errors import ConfigError


def fetch_command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A released model, or OWNER/NAME on the hub.")
    ],
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="URL|FILE|DIR",
            help="Of a released model: the archive, or a folder that holds it (default: its own "
            "address).",
        ),
    ] = "",
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Of a released model: its new folder (default: the user's data)."
        ),
    ] = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
) -> None:  # fmt: skip
    """Fetch a model, for later use without a network.

    Its name can then be given wherever a model folder can.

    What was downloaded is checked; a download that was broken off goes on. A model of the hub lies
    in the Hugging Face cache (HF_HOME), whose contents hf cache lists and removes.
    """
    from penstock.models.released import released_models

    if "/" in name and name not in released_models():
        if source or to is not None:
            raise ConfigError(f"--from and --to are for released models; {name} is one of the hub")
        _fetch_from_hub(name, revision, trust_remote_code=trust_remote_code)
        return
    if revision is not None or trust_remote_code:
        raise ConfigError("--revision and --trust-remote-code are for models of the hub")
    _fetch_released(name, source, to)


def _fetch_from_hub(name: str, revision: str | None, *, trust_remote_code: bool) -> None:
    from penstock.cli.command import import_torch

    import_torch()
    from penstock.models.loader import fetch_hub_model

    with BytesProgress(PlainConsole(stderr=True), f"fetching {name}") as progress:
        folder = fetch_hub_model(
            name, revision=revision, trust_remote_code=trust_remote_code, on_bytes=progress.update
        )
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    at = name if revision is None else f"{name} --revision {revision}"
    say(f"{name}: {format_bytes(size)} in {folder}\ntry it: penstock generate {at} --prompt TEXT")


def _fetch_released(name: str, source: str, to: Path | None) -> None:
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
    with BytesProgress(PlainConsole(stderr=True), f"fetching {name}") as progress:
        fetch(released, target, source=source, on_bytes=progress.update)
    known = name if to is None else str(target)
    say(f"{name}: {target}\ntry it: penstock generate {known} --prompt-file FILE")
