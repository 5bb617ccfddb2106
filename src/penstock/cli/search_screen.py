"""What a person sees of a search: prefill's progress, the beams as they grow, the end table."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.cli.console import plain
from penstock.cli.process_sizes import ProcessSizes
from penstock.cli.screen import TokenProgress
from penstock.cli.tables import print_table
from penstock.core.byte_size import format_bytes
from penstock.engine.beams.decoding import GroupDone, StepTraffic
from penstock.search.search_params import SearchParams
from penstock.search.search_tree import SearchNode, SearchOutput, SearchPlace, SearchStep

_SHOWN_BEAMS = 8
_REFRESHES_PER_S = 6


class SearchScreen:
    """The live view of a search; in a pipe, a line for each step.

    A context manager; `stop` clears the view so that other text can follow.

    Args:
        console: None shows nothing.
        params: of the search.
        place: tells where the beams lie now, or None.
    """

    def __init__(
        self, console: Console | None, params: SearchParams,
        place: Callable[[], SearchPlace | None],
    ) -> None:  # fmt: skip
        self._console = console
        self._params = params
        self._place = place
        self._prefill = None if console is None else TokenProgress(console)
        self._live: Live | None = None
        self._began_s = time.perf_counter()
        self._last: SearchStep | None = None
        self._group: GroupDone | None = None
        self._beams: list[tuple[SearchNode, str]] = []
        self._traffic = StepTraffic()
        self._new_tokens = 0
        self._decode_s = 0.0
        self._now: SearchPlace | None = None  # the view is drawn in a thread of its own

    def __enter__(self) -> "SearchScreen":
        if self._prefill is not None:
            self._prefill.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Clear the view. A second call does nothing."""
        if self._prefill is not None:
            self._prefill.stop()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_prefill(self, done: int, total: int) -> None:
        """For `BeamSearcher.search(on_prefill=...)`."""
        if self._prefill is None or self._console is None:
            return
        self._prefill.update(done, total)
        if done >= total and self._console.is_terminal:
            self._prefill.stop()
            self._live = Live(
                console=self._console, transient=True, get_renderable=self.view,
                refresh_per_second=_REFRESHES_PER_S,
            )  # fmt: skip
            self._live.start()

    def on_group(self, done: GroupDone) -> None:
        """For `BeamSearcher.search(on_group=...)`."""
        self._group = done
        self._now = self._place()

    def on_step(self, step: SearchStep) -> None:
        """For `BeamSearcher.search(on_step=...)`."""
        self._group = None
        self._now = self._place()
        self._traffic.add(step.record.traffic)
        self._new_tokens += step.record.new_tokens
        self._decode_s += step.record.decode_s
        finished = [node for node, _ in self._beams if node.fate == "finished"]
        alive = [node for node in step.nodes if node.fate != "pruned"]
        best = sorted([*finished, *alive], key=lambda node: -node.score)
        self._beams = [(node, step.tree.text(node.id)) for node in best]
        self._last = step
        if self._console is not None and not self._console.is_terminal:
            self._console.print(self._line(step), highlight=False, soft_wrap=True)

    def view(self) -> RenderableType:
        """The screen as it is now."""
        assert self._console is not None
        return Group(self._headline(), self._beam_table(self._console.width), self._figures())

    def _line(self, step: SearchStep) -> str:
        record = step.record
        best = f"best {self._beams[0][0].score:.4g}" if self._beams else "nothing kept"
        groups = _groups(len(record.group_sizes))
        return (
            f"{self._step_of(record.step + 1)}  {self._tokens_of()}  {record.num_candidates} "
            f"candidates in {groups}  {best}  loaded {format_bytes(self._traffic.loaded_bytes)}  "
            f"{self._rate():,.1f} tokens/s"
        )

    def _step_of(self, step: int) -> str:
        most = self._params.most_steps
        return f"step {step}" if most is None else f"step {min(step, most)}/{most}"

    def _tokens_of(self) -> str:
        """How far the longest beam is."""
        longest = max((node.num_tokens for node, _ in self._beams), default=0)
        return f"{longest:,}/{self._params.max_new_tokens:,} tokens"

    def _headline(self) -> Table:
        step = 1 if self._last is None else self._last.record.step + 2
        group = self._group
        done, of = (0, 1) if group is None else (group.index + 1, group.num_groups)
        row = Table.grid(padding=(0, 2))
        words = f"group {done} of {of}" if group else "running"
        gone_s = time.perf_counter() - self._began_s
        row.add_row(
            Text(self._step_of(step), style="bold"), Text(self._tokens_of()),
            ProgressBar(total=of, completed=done, width=20), Text(words),
            Text(f"{gone_s:.0f} s", style="dim"),
        )  # fmt: skip
        return row

    def _beam_table(self, width: int) -> Table:
        return beam_table(self._beams[:_SHOWN_BEAMS], width)

    def _figures(self) -> Text:
        traffic = StepTraffic()
        traffic.add(self._traffic)
        if self._group is not None:
            traffic.add(self._group.traffic)
        parts = [
            f"loaded {format_bytes(traffic.loaded_bytes)}",
            f"written {format_bytes(traffic.written_bytes)}",
            f"{self._rate():,.1f} tokens/s",
        ]
        if self._now is not None:
            memory = self._now.memory
            used = format_bytes(memory.used_bytes)
            parts.append(f"fast memory {used} of {format_bytes(memory.limit_bytes)}")
        return Text("   ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")

    def _rate(self) -> float:
        return self._new_tokens / self._decode_s if self._decode_s else 0.0


def beam_table(beams: Sequence[tuple[SearchNode, str]], width: int) -> Table:
    """Beams and their texts, a row each: score, tokens, whether it is finished, its text's end."""
    table = Table(border_style="dim", expand=False)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    any_finished = any(node.fate == "finished" for node, _ in beams)
    if any_finished:
        table.add_column("", no_wrap=True)
    table.add_column("ends in", no_wrap=True)
    for node, text in beams:
        figures = [f"{node.score:.4g}", f"{node.num_tokens:,}"]
        if any_finished:
            figures.append("finished" if node.fate == "finished" else "")
        table.add_row(*figures, plain(tail(text, width - 32 - 11 * any_finished)))
    return table


def _groups(count: int) -> str:
    return f"{count} group{'s' * (count != 1)}"


def tail(text: str, width: int) -> str:
    """The end of a text in one line of at most `width` characters, at least 10."""
    line, width = " ".join(text.split()), max(width, 10)
    return line if len(line) <= width else "…" + line[-(width - 1) :]


def search_rows(output: SearchOutput, sizes: ProcessSizes | None = None) -> list[tuple[str, str]]:
    """The end table as (what, figure) pairs; says "simulated" wherever a simulated disk counts."""
    place, traffic = output.place, output.traffic
    mark = " (simulated disk)" if place is not None and place.simulated else ""
    pruned = sum(node.fate == "pruned" for node in output.tree)
    reasons = [beam.finish_reason for beam in output.beams]
    ends = ", ".join(f"{reasons.count(r)} by {r}" for r in dict.fromkeys(reasons))
    score_s = sum(record.score_s for record in output.steps)
    groups = max((len(record.group_sizes) for record in output.steps), default=0)
    rate, share = output.tokens_per_s, traffic.stall_s / (output.decode_s or 1.0)
    rows = {
        "beams": f"{output.settings['beams']}, width {output.settings['width']}, seed "
        f"{output.settings['seed']}",
        "found": f"{len(output.beams)} answers: {ends}" if output.beams else "nothing yet",
        "steps": f"{len(output.steps)} of at most {output.settings['step_tokens']} tokens, "
        f"{len(output.tree):,} candidates, {pruned:,} pruned",
        "scored by": f"{output.scorer}, {score_s:.2f} s",
        "prefill": f"{len(output.prompt_token_ids):,} tokens, {output.prefill_s:.1f} s",
        "decode": f"{output.new_tokens:,} tokens, {rate:,.1f} tokens/s{mark}, "
        f"{output.decode_s:.1f} s",
    }
    if place is not None:
        memory = place.memory
        limit = format_bytes(memory.limit_bytes)
        rows |= {
            "strategy": f"{place.strategy}, at most {_groups(groups)} in a step",
            "KV cache": f"{format_bytes(memory.peak_bytes)} of a budget of {limit} in fast memory",
            **({} if sizes is None else sizes.rows),
            "slow tier": place.store,
        }
    rows |= {
        "loaded": f"{format_bytes(traffic.loaded_bytes)}, "
        f"{format_bytes(traffic.prefetched_bytes)} of it ahead of its turn",
        "written": f"{format_bytes(traffic.written_bytes)}, "
        f"{format_bytes(traffic.copied_bytes)} copied within fast memory",
        "stall share": f"{100 * share:.1f} % of decode waited for bytes{mark}",
    }
    return list(rows.items())


def show_search(console: Console, output: SearchOutput, sizes: ProcessSizes) -> None:
    """Print the notices, the beams and the end table of a search."""
    for notice in () if output.place is None else output.place.notices:
        console.print(Text.assemble(("note: ", "bold yellow"), notice), soft_wrap=True)
    if len(output.beams) > 1:
        beams = [(output.tree.nodes[beam.node], beam.text) for beam in output.beams]
        print_table(console, beam_table(beams[:_SHOWN_BEAMS], console.width))
    table = Table(show_header=False, border_style="dim")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, figure in search_rows(output, sizes):
        table.add_row(what, figure)
    print_table(console, table)
