"""`penstock device`: near-storage devices on this host, for caches on others."""

import contextlib
from typing import Annotated

import typer

from penstock.cli.command import PenstockCommand
from penstock.cli.console import say
from penstock.core.byte_size import parse_bytes
from penstock.core.errors import ConfigError

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
    tls_certificate: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Encrypt by TLS with this certificate (PEM, with those that signed it behind it); "
            "caches want --device-tls.",
        ),
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The certificate's own key (PEM, without a password)."),
    ] = None,
) -> None:
    """Keep and score caches of other hosts, until interrupted (--policy hillinfer --devices)."""
    from penstock.methods.hillinfer.near_storage.device_host import DeviceHost
    from penstock.methods.hillinfer.near_storage.tls import Identity
    from penstock.storage.documents.key_sources import read_key

    key = read_key(f"file:{key_file}", environment={})
    bound = None if memory is None else parse_bytes(memory)
    if (tls_certificate is None) != (tls_key is None):
        raise ConfigError("--tls-certificate and --tls-key go together")
    identity = None
    if tls_certificate is not None and tls_key is not None:
        identity = Identity.of(tls_certificate, tls_key)
    host = DeviceHost(key, listen=listen, disk=disk, memory_bytes=bound, identity=identity)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            say(f"near-storage devices at tcp://{host.address}; interrupt to end")
            if identity is not None:
                say(f"its certificate: {identity.fingerprint}")
            host.serve()
    finally:
        host.close()
    say("ended; what caches had here is gone")
