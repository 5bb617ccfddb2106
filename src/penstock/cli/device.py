"""`penstock device`: near-storage devices on this host, for caches on others."""

import contextlib
from typing import Annotated

import typer

from penstock.cli.command import PenstockCommand
from penstock.cli.console import say
from penstock.core.byte_size import parse_bytes

device_app = typer.Typer(
    name="device", help="Near-storage devices on this host, for caches on others.",
    no_args_is_help=True,
)  # fmt: skip


@device_app.callback()
def _group() -> None:
    """Near-storage devices on this host, for caches on others."""


@device_app.command("serve", cls=PenstockCommand)
def serve_device_command(
    key_file: Annotated[
        str, typer.Option(metavar="FILE", help="The key that caches have too (penstock doc key).")
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 is any that is free.")
    ] = "127.0.0.1:8471",
    disk: Annotated[
        str, typer.Option(metavar="PATH|auto", help="Where the caches lie: a folder.")
    ] = "auto",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bounds what this host holds of the KV cache of all callers, not the weights.",
            show_default="no bound",
        ),
    ] = None,
) -> None:
    """Keep and score caches of other hosts, until interrupted (--policy hillinfer --devices)."""
    from penstock.methods.hillinfer.near_storage.device_host import DeviceHost
    from penstock.storage.documents.key_sources import read_key

    key = read_key(f"file:{key_file}", environment={})
    bound = None if memory is None else parse_bytes(memory)
    host = DeviceHost(key, listen=listen, disk=disk, memory_bytes=bound)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            say(f"near-storage devices at tcp://{host.address}; interrupt to end")
            host.serve()
    finally:
        host.close()
    say("ended; what caches had here is gone")
