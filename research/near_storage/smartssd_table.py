"""What the simulated SmartSSD PC prints: our model's figures with the paper's beside them."""

from collections.abc import Sequence
from typing import Any

from penstock.evaluate.figure_style import short_tokens
from penstock.evaluate.text_table import format_table
from research.near_storage.smartssd_sweep import PAPER_SPEEDUP, RIVALS

Row = dict[str, Any]


def row_of(rows: Sequence[Row], model: str, tokens: int, method: str) -> Row:
    """The row of one method at one length."""
    return next(
        row for row in rows
        if (row["model"], row["tokens"], row["method"]) == (model, tokens, method)
    )  # fmt: skip


def gains(rows: Sequence[Row], row: Row, field: str = "step_ms") -> dict[str, float]:
    """Speed-ups of a row over the three baselines at its length.

    Args:
        field: of the baselines: "step_ms", "placed_ms", "same_drive_ms" or "kindest_ms".
    """
    own = row["step_ms"]
    return {
        name: row_of(rows, row["model"], row["tokens"], name)[field] / own for name in RIVALS
    }  # fmt: skip


def smartssd_table(figures: Row) -> str:
    """All tables."""
    rows: list[Row] = figures["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    parts = [_latencies([row for row in rows if row["model"] == model]) for model in models]
    parts += [_speedups(rows), _splits(figures["splits"]), _sensitivity(figures["sensitivity"])]
    parts += [_by_locality(figures["by_locality"])]
    parts += [_needed(figures["needed"]), _host_memory(figures["host_memory"]), _known(figures)]
    return "\n\n".join(parts)


def _latencies(rows: Sequence[Row]) -> str:
    spots = list(dict.fromkeys(row["tokens"] for row in rows))
    names = list(dict.fromkeys(row["method"] for row in rows))
    first = rows[0]
    header = [f"{first['model']}, batch {first['batch']}: simulated ms of a step",
              *(short_tokens(tokens) for tokens in spots)]  # fmt: skip
    found = [
        [name, *(f"{row_of(rows, first['model'], tokens, name)['step_ms']:,.0f}"
                 for tokens in spots)]
        for name in names
    ]  # fmt: skip
    stored = [
        f"{row_of(rows, first['model'], tokens, names[0])['storage_share']:.0%}" for tokens in spots
    ]
    found.append(["KV that memory cannot hold", *stored])
    return format_table(header, found)


def _speedups(rows: Sequence[Row]) -> str:
    least, most = PAPER_SPEEDUP
    header = [f"speed-up, simulated (paper: {least} to {most}x)", "tokens", *RIVALS,
              "placed", "its drive", "kindest"]  # fmt: skip
    found = []
    for row in rows:
        if not row["method"].startswith("hillinfer"):
            continue
        over = gains(rows, row)
        others = [gains(rows, row, f"{field}_ms") for field in ("placed", "same_drive", "kindest")]
        found.append([
            f"{row['method']}, {row['model']}", short_tokens(row["tokens"]),
            *(f"{over[name]:.2f}" for name in RIVALS),
            *(f"{min(each.values()):.2f}..{max(each.values()):.2f}" for each in others),
        ])  # fmt: skip
    note = (
        "placed: baselines whose memory holds what HillInfer's does; its drive: their SSD no "
        "faster than the SmartSSD's link; kindest: and their indexes on it"
    )
    return f"{format_table(header, found)}\n{note}"


def _splits(sweeps: Sequence[Row]) -> str:
    header = ["split of the pools (Eq. 4, fig. 16b)", "tokens", "Eq. 4", "ms", "best", "ms ",
              "off by", "fig. 16b's"]  # fmt: skip
    rows = []
    for sweep in sweeps:
        eq4, best = sweep["eq4_beta"], sweep["best_beta"]
        off = "-" if None in (eq4, best) else f"{eq4 / best - 1:+.1%}"
        rows.append([
            sweep["title"], short_tokens(sweep["tokens"]), _beta(eq4), f"{sweep['eq4_ms']:.2f}",
            _beta(best), f"{sweep['best_ms']:.2f}", off, f"{sweep['figure_16b_beta']:.2f}",
        ])  # fmt: skip
    return format_table(header, rows)


def _beta(beta: float | None) -> str:
    return "all hot" if beta is None else f"{beta:.2f}"


def _sensitivity(found: Row) -> str:
    header = [f"{found['method']} at {short_tokens(found['tokens'])}: speed-up at -20 % / +20 %",
              *RIVALS]  # fmt: skip
    rows = [["as it is", *(f"{found['speedups'][name]:.2f}" for name in RIVALS)]]
    rows += [
        [row["name"], *(f"{row['0.8'][name]:.2f} / {row['1.2'][name]:.2f}" for name in RIVALS)]
        for row in found["rows"]
    ]
    return format_table(header, rows)


def _by_locality(rows: Sequence[Row]) -> str:
    header = ["speed-up by locality", "tokens", *RIVALS]
    return format_table(header, [
        [f"{row['method']}: {row['source']}", short_tokens(row["tokens"]),
         *(f"{row['speedups'][name]:.2f}" for name in RIVALS)] for row in rows
    ])  # fmt: skip


def _needed(found: Row) -> str:
    rows = [
        [f"{row['constant']}, {row['now'] / 1e9:.1f} GB/s now",
         *("none" if row["needed"][name] is None else f"{row['needed'][name] / 1e9:.2f}"
           for name in RIVALS)]
        for row in found["rows"]
    ]  # fmt: skip
    title = f"GB/s for {found['target']}x ({found['method']}, {short_tokens(found['tokens'])})"
    return format_table([title, *RIVALS], rows)


def _host_memory(rows: Sequence[Row]) -> str:
    header = ["host memory for KV: speed-up", "tokens", "KV in storage", *RIVALS]
    return format_table(header, [
        [f"{row['host_kv_gib']} GiB", short_tokens(row["tokens"]), f"{row['storage_share']:.0%}",
         *(f"{row['speedups'][name]:.2f}" for name in RIVALS)] for row in rows
    ])  # fmt: skip


def _known(figures: Row) -> str:
    """Absolute figures that the paper's text has, beside the model's."""
    move, batch = figures["calibration"], figures["batches"]
    ours = ", ".join(
        f"{share:.0%} {ms:,.0f} ms"
        for share, ms in zip(move["shares"], move["ours_ms"], strict=True)
    )
    slowest, fastest = (bandwidth / 1e9 for bandwidth in move["bandwidth_for_2000_ms"])
    last = batch["rows"][-1]
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in last["seconds"].items())
    return (
        f"Fig. 3a, KV from the SSD at 12K, batch 8: ours {ours}; paper: more than "
        f"{move['paper_ms']:,.0f} ms (2,000 ms are {slowest:.1f} to {fastest:.1f} GB/s)\n"
        f"Fig. 14, OPT-6.7B, 1,920 + 128 tokens, batch {last['batch']}: ours {seconds}; paper: "
        f"H2O-like and prefetch-based over {batch['paper_over_s']:.0f} s, HillInfer under "
        f"{batch['paper_hillinfer_under_s']:.0f} s. All KV of that fits GPU and host memory here "
        f"({last['storage_share']:.0%} in storage); moving all of it at every step in 50 s would "
        f"be {batch['bandwidth_if_all_kv_moved'] / 1e9:.0f} GB/s"
    )
