"""What a person sees of a run: prefill's progress, the answer as it comes, and the end table."""

import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from penstock.cli.console import for_reader
from penstock.cli.process_sizes import ProcessSizes
from penstock.cli.tables import print_table
from penstock.core.byte_size import format_bytes
from penstock.core.stats import PhaseStats
from penstock.generation.output import RunReport

_STEPS_IN_A_PIPE = 10
_INDEX = "indexing the prompt"
_QUIET_S = 1.0
"""An index that takes less is not spoken of."""


class TokenProgress:
    """Progress through tokens: a live bar on a terminal, ten lines in a pipe.

    A context manager; `update` may be called from the moment it is entered, and `stop` clears
    the bar so that other text can follow.
    """

    def __init__(self, console: Console, what: str = "prefill") -> None:
        self._console = console
        self._what = what
        self._started_s = 0.0
        self._latest = (0, 0.0)  # tokens done and when, as of the last update
        self._steps_shown = 0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = _bar(console, what)

    def __enter__(self) -> "TokenProgress":
        self._started_s = time.perf_counter()
        self._latest = (0, self._started_s)
        if self._bar is not None:
            self._bar.add_task(self._what, total=None, figures="")
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def update(self, done: int, total: int) -> None:
        """Show that `done` of `total` tokens are through."""
        figures = self._figures(done, total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, figures=figures)
            return
        step = done * _STEPS_IN_A_PIPE // total
        if step > self._steps_shown:
            self._steps_shown = step
            line = f"{self._what} {100 * done // total:>3} %  {figures}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _figures(self, done: int, total: int) -> str:
        """Tokens, the mean rate, and the time left at the rate of the newest chunk.

        Later chunks attend to a longer past and are slower, so the mean would promise too much.
        """
        now_s = time.perf_counter()
        done_before, before_s = self._latest
        self._latest = (done, now_s)
        rate = done / (now_s - self._started_s)
        left_s = (total - done) * (now_s - before_s) / max(done - done_before, 1)
        return f"{done:,}/{total:,} tokens  {rate:,.0f} tokens/s  ETA {left_s:.0f} s"

    def stop(self) -> None:
        """Clear the bar. A second call does nothing."""
        if self._bar is not None:
            self._bar.stop()


class LateProgress:
    """Progress of something that may be done at once, when it turns out to take a while.

    A live bar on a terminal; in a pipe, a line whenever another tenth is done.
    """

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._began_s = 0.0
        self._steps_shown = 0
        self._bar: Progress | None = None

    def update(self, share: float) -> None:
        """Show that so much is done; share: from 0 to 1."""
        now_s = time.perf_counter()
        self._began_s = self._began_s or now_s
        gone_s = now_s - self._began_s
        if gone_s < _QUIET_S:
            return
        left_s = gone_s * (1 - share) / max(share, 1e-3)
        figures = f"{gone_s:.0f} s gone  ETA {left_s:.0f} s"
        if self._console.is_terminal:
            if self._bar is None:
                self._bar = _bar(self._console, self._what)
                self._bar.add_task(self._what, total=1.0, figures="")
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], completed=share, figures=figures)
            if share >= 1:
                self.stop()
            return
        step = int(share * _STEPS_IN_A_PIPE)
        if step > self._steps_shown:
            self._steps_shown = step
            line = f"{self._what} {share:4.0%}  {figures}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Clear the bar. A second call does nothing."""
        if self._bar is not None:
            self._bar.stop()


def _bar(console: Console, what: str) -> Progress:
    columns = (
        TextColumn(what, markup=False), BarColumn(bar_width=32),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[figures]}"),
    )  # fmt: skip
    return Progress(*columns, console=console, transient=True)


class AnswerScreen:
    """Progress while the prompt runs, then the answer, piece by piece.

    Args:
        console: for progress and everything else that is not the answer; None shows nothing.
        out: where the answer goes, or None to keep quiet about it.
        lead: printed before the answer's first piece.
    """

    def __init__(self, console: Console | None, out: TextIO | None, lead: str = "") -> None:
        self._out = out
        self._lead = lead
        self._answered = False
        self._console = console
        self._later: dict[int, list[str]] = {}
        self._progress = None if console is None else TokenProgress(console)
        self._index = None if console is None else LateProgress(console, _INDEX)

    def __enter__(self) -> "AnswerScreen":
        if self._progress is not None:
            self._progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        if self._out is None or not (self._answered or self._later):
            return
        self._out.write("\n")
        for number, pieces in sorted(self._later.items()):
            self._out.flush()
            if self._console is not None:
                self._console.print(f"answer {number + 1}", style="bold")
            self._out.write(for_reader("".join(pieces), self._out) + "\n")
        self._out.flush()

    def on_progress(self, done: int, total: int) -> None:
        """For `LLM.generate(on_progress=...)`."""
        if self._progress is not None:
            self._progress.update(done, total)

    def on_index(self, share: float) -> None:
        """For `LLM.generate(on_index=...)`."""
        if self._progress is not None and self._index is not None:
            self._progress.stop()
            self._index.update(share)

    def _stop(self) -> None:
        for shown in (self._progress, self._index):
            if shown is not None:
                shown.stop()

    def on_text(self, row: int, piece: str) -> None:
        """For `LLM.generate(on_text=...)`; further answers to the prompt are shown at the end."""
        if row:
            self._later.setdefault(row, []).append(piece)
            return
        if self._out is None:
            return
        if not self._answered:
            self._stop()
            self._out.write(self._lead)
            self._answered = True
        self._out.write(for_reader(piece, self._out))
        self._out.flush()


def report_rows(report: RunReport, sizes: ProcessSizes | None = None) -> list[tuple[str, str]]:
    """The end table as (what, figure) pairs; says "simulated" wherever a simulated disk counts.

    Args:
        sizes: of weights and process, which stand beside the cache's.
    """
    memory, decode = report.memory, report.stats.decode
    mark = " (simulated disk)" if report.simulated else ""
    held = f"{format_bytes(memory.peak_bytes)} of a budget of {format_bytes(memory.limit_bytes)}"
    if memory.full_cache_bytes > memory.peak_bytes > 0:
        share = memory.full_cache_bytes / memory.peak_bytes
        held += f", 1/{share:.1f} of the full {format_bytes(memory.full_cache_bytes)}"
    prefill_rate, decode_rate = report.prefill_tokens_per_s, report.decode_tokens_per_s
    prefill = f"{prefill_rate:,.0f} tokens/s{mark}, {report.prefill_s:.1f} s"
    if stored := _stored(report):
        prefill += f", behind {stored}"
    if (index_s := report.stats.prefill.index_s) >= 0.1:
        prefill += f", of them {index_s:.1f} s for its index"
    rows = {
        "policy": f"{report.policy}, exact" if report.exact else report.policy,
        "KV cache lies on": report.store,
        "KV cache": held,
        **({} if sizes is None else sizes.rows),
        "prefill": prefill,
        "decode": "the only token came out of prefill",
    }
    if report.decode_tokens:
        rows |= {
            "decode": f"{decode_rate:,.1f} tokens/s{mark}, {report.decode_s:.2f} s",
            "read per token": format_bytes(decode.read_bytes_per_token),
            "hit rate": _hit_rate(decode),
            "stall share": f"{100 * decode.stall_share:.1f} % of decode waited for reads{mark}",
        }
    if decode.counters.get("mass_steps"):
        rows["attention"] = _attention(decode)
    if (verified := report.verified) is not None and verified.passes:
        each = format_bytes(verified.exact_bytes_per_token)
        rows |= {
            "verified": f"{verified.tokens_per_pass:.1f} tokens a pass: {verified.passes:,} exact "
            f"passes, {100 * verified.accepted_share:.0f} % of {verified.drafted:,} drafted tokens "
            "accepted",
            "time per token": f"{verified.seconds_per_token:.3f} s{mark}; an exact pass takes "
            f"{verified.seconds_per_pass:.3f} s{mark}",
            "read per token": f"{format_bytes(verified.bytes_per_token)}; exact reads {each}",
        }
    return list(rows.items())


def _stored(report: RunReport) -> str:
    """What came out of a stored document; empty where there was none."""
    total = report.restored_tokens + report.recomputed_tokens
    if not total:
        return ""
    said = f"{report.restored_tokens:,} of {total:,} stored tokens"
    return f"{said}, {report.recomputed_tokens:,} recomputed" if report.recomputed_tokens else said


def _attention(decode: PhaseStats) -> str:
    """What steps had of the attention by estimate, and what was done where that was too little."""
    counters = decode.counters
    steps, layers = counters["mass_steps"], counters["mass_steps"] / max(1, decode.tokens)
    bar = 196 * (counters["mass_variance"] / steps / max(1.0, layers)) ** 0.5
    said = (
        f"{100 * counters['mass_captured'] / steps:.1f} % ± {bar:.1f} of it was attended to; "
        f"{100 * counters['mass_capped'] / steps:.0f} % of the layers' steps filled all slots"
    )
    done = {
        "mass_read_again": "read again",
        "mass_tail": "had the tail's mean added",
        "mass_exact": "were computed exactly",
    }
    for name, words in done.items():
        if count := counters.get(name):
            said += f", {100 * count / steps:.1f} % {words}"
    return said


def _hit_rate(decode: PhaseStats) -> str:
    if decode.units_wanted:
        kept = ""
        if decode.units_reused:
            share = decode.units_reused / (decode.units_reused + decode.units_wanted)
            kept = f", {100 * share:.0f} % of all were kept without asking"
        return f"{100 * decode.hit_rate:.0f} % of the wanted groups were in memory{kept}"
    return "none: every step reads the whole past" if decode.read_bytes else "nothing to fetch"


def show_report(console: Console, report: RunReport, sizes: ProcessSizes) -> None:
    """Print the notices and the end table of a run."""
    for notice in report.notices:
        console.print(Text.assemble(("note: ", "bold yellow"), notice), soft_wrap=True)
    table = Table(show_header=False, border_style="dim")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, figure in report_rows(report, sizes):
        table.add_row(what, figure)
    print_table(console, table)
