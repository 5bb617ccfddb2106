"""`penstock devices`: what this disk does, and the simulated devices to choose from."""

import json
import time
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from penstock.cli.console import PlainConsole
from penstock.cli.options import JsonOption
from penstock.cli.tables import print_table
from penstock.core.byte_size import format_bytes, parse_bytes
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.devices.measure import Cell
    from penstock.devices.profile import DeviceProfile
    from penstock.storage.measured_directory import DirectoryMeasurement

_PATIENCE_S = 2.0
"""A measurement that takes longer than this shows its progress."""
_PRESET_REQUESTS = (4 << 10, 16 << 10, 64 << 10, 1 << 20)


class LateBar:
    """A progress bar on stderr that appears when the work turns out to be long."""

    def __init__(self) -> None:
        self._console = PlainConsole(stderr=True)
        self._began = time.perf_counter()
        self._bar: Progress | None = None

    def __enter__(self) -> "LateBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, share: float, what: str) -> None:
        """Show that `share` in [0, 1] of the work is done."""
        if time.perf_counter() - self._began < _PATIENCE_S:
            return
        if self._bar is None:
            columns = TextColumn("{task.description}"), BarColumn(bar_width=32)
            self._bar = Progress(
                *columns,
                TextColumn("{task.percentage:>3.0f} %"),
                console=self._console,
                transient=True,
            )
            self._bar.add_task(what, total=1.0)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=share, description=what)


def devices_command(
    disk: Annotated[
        str,
        typer.Option(metavar="PATH|auto", help="Folder to measure; auto is where caches go."),
    ] = "auto",
    size: Annotated[
        str, typer.Option("--size", help="Size of the file to read from, such as 512MiB.")
    ] = "512MiB",
    as_json: JsonOption = False,
) -> None:
    """Measure the disk for KV caches; list simulated ones."""
    from penstock.devices.measure import fit_profile
    from penstock.devices.presets import PRESETS
    from penstock.storage.measured_directory import measure_directory

    if disk in ("memory", *PRESETS):
        raise ConfigError(f"{disk} is not a directory; write ./{disk} to measure one of that name")
    file_bytes = parse_bytes(size) // 4096 * 4096
    with LateBar() as bar:
        measured = measure_directory(disk, file_bytes=file_bytes, progress=bar.update)
    fitted = fit_profile(measured.cells, name="measured", sector_bytes=measured.sector_bytes)
    if as_json:
        print(json.dumps(_as_dict(measured, fitted, file_bytes), indent=2))
        return
    console = PlainConsole()
    _show_measured(console, measured, fitted, file_bytes)
    console.print()
    print_table(console, _preset_table())


def _show_measured(
    console: Console, measured: "DirectoryMeasurement", fitted: "DeviceProfile", file_bytes: int
) -> None:
    where = f"Measured: {measured.description}, a file of {format_bytes(file_bytes)}"
    console.print(Text(where), soft_wrap=True)
    if not measured.is_direct:
        warning = "These figures may be those of the page cache or of memory, not of a disk."
        console.print(Text(warning, style="yellow"))
    print_table(console, _read_table(measured.cells))
    console.print(
        Text(
            f"sequential write {measured.write_bandwidth / 1e6:,.0f} MB/s; a read costs about "
            f"{fitted.request_s * 1e6:.0f} us + its bytes at {fitted.bandwidth / 1e6:,.0f} MB/s"
        )
    )


def _read_table(cells: "list[Cell]") -> Table:
    """Random reads in MB/s: a row for each request size, a column for each depth."""
    depths = sorted({cell.depth for cell in cells})
    table = Table(title="random reads, MB/s (reads submitted and awaited together)")
    table.add_column("request", justify="right", no_wrap=True)
    for depth in depths:
        table.add_column(f"{depth} at once", justify="right", no_wrap=True)
    bandwidth = {(cell.request_bytes, cell.depth): cell.bandwidth for cell in cells}
    for request_bytes in sorted({cell.request_bytes for cell in cells}):
        values = [bandwidth.get((request_bytes, depth)) for depth in depths]
        table.add_row(
            format_bytes(request_bytes),
            *("" if value is None else f"{value / 1e6:,.0f}" for value in values),
        )
    return table


def _preset_table() -> Table:
    """The simulated devices and what they would read, in MB/s."""
    from penstock.devices.presets import PRESETS

    table = Table(title="devices to simulate (--disk NAME), MB/s by request size")
    table.add_column("name", no_wrap=True)
    table.add_column("device", no_wrap=True)
    for request_bytes in _PRESET_REQUESTS:
        table.add_column(format_bytes(request_bytes), justify="right", no_wrap=True)
    table.add_column("reads/s", justify="right", no_wrap=True)
    for profile in PRESETS.values():
        values = [f"{profile.read_bandwidth(r) / 1e6:,.0f}" for r in _PRESET_REQUESTS]
        table.add_row(profile.name, f"{profile.title} (simulated)", *values, f"{profile.iops:,.0f}")
    return table


def _as_dict(
    measured: "DirectoryMeasurement", fitted: "DeviceProfile", file_bytes: int
) -> dict[str, Any]:
    """Everything as plain data; bandwidths in bytes per second, times in seconds."""
    from penstock.devices.presets import PRESETS

    return {
        "measured": {
            "where": measured.description,
            "is_direct": measured.is_direct,
            "file_bytes": file_bytes,
            "sector_bytes": measured.sector_bytes,
            "write_bytes_per_s": measured.write_bandwidth,
            "request_s": fitted.request_s,
            "read_bytes_per_s": fitted.bandwidth,
            "reads": [
                {
                    "request_bytes": cell.request_bytes,
                    "depth": cell.depth,
                    "bytes_per_s": cell.bandwidth,
                    "batch_s": cell.batch_s,
                    "batches": cell.num_batches,
                }
                for cell in measured.cells
            ],
        },
        "simulated": [
            {
                "name": profile.name,
                "title": profile.title,
                "simulated": True,
                "read_bytes_per_s": profile.bandwidth,
                "reads_per_s": profile.iops,
                "latency_s": profile.latency_s,
                "by_request_bytes": {
                    str(size): profile.read_bandwidth(size) for size in _PRESET_REQUESTS
                },
                "source": profile.source,
            }
            for profile in PRESETS.values()
        ],
    }
