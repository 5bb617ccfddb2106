"""The throughput table as text."""

from collections.abc import Sequence

from penstock.core.byte_size import format_bytes
from penstock.evaluate.prefill_run import PrefillRow
from penstock.evaluate.text_table import format_table
from penstock.evaluate.throughput_run import RowResult

_HEADER = (
    "batch", "step ms", "p10", "p90", "tokens/s", "stall", "hits", "MB/token", "reads/token",
    "ledger", "growth", "predicted ms",
)  # fmt: skip
NOTES = """\
step ms: median of all measured steps, p10 and p90 beside it. stall: share of the time that
attention waited for reads. hits: selected groups that were already in memory. ledger: fast memory
that the cache booked. growth: what the process really grew by. predicted: floor + max(0, device
read time - floor). "77 % overlap": a synthetic stream of selections, because those of random
weights hardly overlap. "simulated": a device by its published figures, not one that was there."""
PREFILL_NOTES = """\
first token: from the first chunk of the prompt to the end of the first decode step."""


def decode_table(results: Sequence[RowResult]) -> str:
    """All rows of all batch sizes."""
    rows = []
    for result in sorted(results, key=lambda r: r.batch):
        if result.skipped is not None:
            rows.append([result.name, f"batch {result.batch}: {result.skipped}"])
        else:
            rows.append([result.name, str(result.batch), *_cells(result)])
    return format_table(("row", *_HEADER), rows)


def _cells(result: RowResult) -> list[str]:
    figures = result.figures

    def number(name: str, pattern: str, factor: float = 1.0) -> str:
        value = figures.get(name)
        return "" if value is None else format(value * factor, pattern)

    def size(name: str) -> str:
        return format_bytes(figures[name]) if name in figures else ""

    return [
        number("median_ms", ".1f"), number("p10_ms", ".1f"), number("p90_ms", ".1f"),
        number("tokens_per_s", ".2f"), number("stall_share", ".1%"), number("hit_rate", ".0%"),
        number("read_bytes_per_token", ".1f", 1e-6), number("reads_per_token", ".0f"),
        size("ledger_bytes"), size("growth_bytes"), number("predicted_ms", ".1f"),
    ]  # fmt: skip


def prefill_table(rows: Sequence[PrefillRow]) -> str:
    """The ways to prefill."""
    out = []
    for row in rows:
        if row.ttft_s is None:
            out.append([row.label, row.skipped])
            continue
        seconds = min(row.seconds)
        peak = "" if row.peak_bytes is None else format_bytes(row.peak_bytes)
        ledger = "" if row.ledger_bytes is None else format_bytes(row.ledger_bytes)
        speed, ttft = f"{row.tokens / seconds:.0f}", f"{row.ttft_s:.2f}"
        out.append([row.label, f"{seconds:.2f}", speed, ttft, peak, ledger])
    title = f"prefill of {rows[0].tokens} tokens"
    header = (title, "s (best)", "tokens/s", "first token s", "peak growth", "ledger")
    return f"{format_table(header, out)}\n\n{PREFILL_NOTES}"


def stream_lines(results: Sequence[RowResult]) -> list[str]:
    """Where selections came from, but for those that the policies made themselves."""
    streams: dict[str, list[str]] = {}
    for result in results:
        if result.stream != "own":
            names = streams.setdefault(result.stream, [])
            names += [] if result.name in names else [result.name]
    return [f"selections {stream}: {'; '.join(names)}" for stream, names in streams.items()]


def burst_lines(results: Sequence[RowResult]) -> list[str]:
    """What the read bursts reached."""
    lines = []
    for result in results:
        burst = result.figures.get("burst")
        if burst is not None:
            lines.append(
                f"burst, batch {result.batch}, {result.name}: {burst['bandwidth'] / 1e6:.0f} MB/s "
                f"in batches of {burst['depth']} x {format_bytes(burst['request_bytes'])}; the "
                f"device alone {burst['device_bandwidth'] / 1e6:.0f} MB/s ({burst['share']:.0%})"
            )
    return lines


def caveat_lines(results: Sequence[RowResult]) -> list[str]:
    """Simulated rows over a disk that is slower than the device that it plays."""
    return [
        f"{r.name}, batch {r.batch}: simulated over a disk that is slower than the device, because "
        "memory was too small; a real one would be faster"
        for r in results
        if r.figures.get("disk_too_slow")
    ]
