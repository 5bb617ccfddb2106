"""`penstock cluster`: near-storage devices on the disks of a running Ray cluster."""

import os
from typing import Annotated

import typer
from rich.table import Table

from penstock.cli.command import PenstockCommand
from penstock.cli.console import PlainConsole, say
from penstock.cli.tables import print_table
from penstock.core.byte_size import format_bytes, parse_bytes

cluster_app = typer.Typer(
    name="cluster", help="Near-storage devices on the disks of a running Ray cluster.",
    no_args_is_help=True,
)  # fmt: skip
RayOption = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Of the cluster.", show_default="as Ray finds it"),
]


@cluster_app.callback()
def _group() -> None:
    """Near-storage devices on the disks of a running Ray cluster."""


@cluster_app.command("up", cls=PenstockCommand)
def up_command(
    key_file: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="The key that caches have too, under this path on every host."
        ),
    ],
    devices: Annotated[int, typer.Option(min=1, help="How many; each wants one penstock_disk.")],
    disk: Annotated[
        str,
        typer.Option(
            metavar="PATH|auto", help="Folder of a host; of several, a,b, each device takes one."
        ),
    ] = "auto",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Bounds what each device holds of KV caches, not the weights.",
            show_default="no bound",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65000, help="Of the first device, the next has the next.")
    ] = 8471,
    ray: RayOption = None,
) -> None:  # fmt: skip
    """Start devices that stay until `penstock cluster down`; Ray restarts one that ends."""
    from penstock.cluster.ray_devices import DeviceSetup, up

    disks = tuple(each if each == "auto" else os.path.abspath(each) for each in disk.split(","))
    setup = DeviceSetup(
        key_file=os.path.abspath(key_file), disks=disks, first_port=port,
        memory_bytes=None if memory is None else parse_bytes(memory),
    )  # fmt: skip
    for address in up(devices, setup, address=ray):
        say(f"tcp://{address}")


@cluster_app.command("status", cls=PenstockCommand)
def status_command(ray: RayOption = None) -> None:
    """List the devices that `penstock cluster up` has started."""
    from penstock.cluster.ray_devices import states

    table = Table("device", "state", "address", "disk", "memory", "why")
    found = states(address=ray)
    for each in found:
        held = format_bytes(each.memory_bytes) if each.state == "up" else ""
        address = f"tcp://{each.address}" if each.address else ""
        table.add_row(str(each.number), each.state, address, each.disk, held, each.why)
    if not found:
        say("no device is up")
        return
    print_table(PlainConsole(), table)


@cluster_app.command("down", cls=PenstockCommand)
def down_command(ray: RayOption = None) -> None:
    """End the devices; what caches had there is gone."""
    from penstock.cluster.ray_devices import down

    say(f"{down(address=ray)} devices ended")
