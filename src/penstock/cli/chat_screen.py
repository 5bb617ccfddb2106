"""What a person sees of a chat: progress, the answer as it comes, a line behind it, figures."""

from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.console import for_reader, plain
from penstock.cli.screen import LateProgress, TokenProgress
from penstock.cli.tables import print_table
from penstock.core.byte_size import format_bytes

if TYPE_CHECKING:
    from penstock.documents.conversation import ChatTurn, Conversation

_SHORT_TOKENS = 256
"""A prefill of fewer tokens is not spoken of."""


class TurnScreen:
    """Progress of a prefill, then the answer, piece by piece; a context manager.

    Args:
        console: for progress.
        out: where the answer goes.
    """

    def __init__(self, console: Console, out: TextIO) -> None:
        self._console, self._out = console, out
        self._progress: TokenProgress | None = None
        self._index = LateProgress(console, "indexing the chat")
        self.has_begun = False
        """Whether anything of an answer was shown."""

    def __enter__(self) -> "TurnScreen":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        if self.has_begun:
            self._out.write("\n")
            self._out.flush()

    def on_tokens(self, done: int, total: int) -> None:
        """So many tokens of so many are prefilled."""
        if total < _SHORT_TOKENS:
            return
        if self._progress is None:
            self._progress = TokenProgress(self._console)
            self._progress.__enter__()
        if done:
            self._progress.update(done, total)

    def on_index(self, share: float) -> None:
        """So much of the index is made. Behind the first token a bar would cover the answer."""
        if self.has_begun:
            return
        if self._progress is not None:
            self._progress.stop()
        self._index.update(share)

    def on_text(self, piece: str) -> None:
        """A piece of the answer is there."""
        if not self.has_begun:
            self._stop()
            self.has_begun = True
        self._out.write(for_reader(piece, self._out))
        self._out.flush()

    def _stop(self) -> None:
        for shown in (self._progress, self._index):
            if shown is not None:
                shown.stop()


def turn_line(turn: "ChatTurn", chat: "Conversation") -> str:
    """What a turn took, in a line."""
    run, memory = turn.output.run, turn.memory
    count = len(turn.output.token_ids)
    answer = f"{count:,} token{'s' * (count != 1)}"
    if run.decode_tokens:
        answer += f", {run.decode_tokens_per_s:,.1f}/s{' simulated' if run.simulated else ''}"
    used, used_unit = format_bytes(memory.used_bytes).split()
    limit, unit = format_bytes(memory.limit_bytes).split()
    held = f"{used if unit == used_unit else f'{used} {used_unit}'}/{limit} {unit} held"
    return " | ".join(
        [
            answer, f"{turn.prefilled_tokens:,} prefilled", held,
            f"{format_bytes(turn.read_bytes)} read", f"{len(chat.tokens):,}/{chat.max_tokens:,}",
        ]
    )  # fmt: skip


def show_turn(console: Console, turn: "ChatTurn", chat: "Conversation") -> None:
    """Print the line behind an answer, and what there is to say of its end."""
    _print(console, Text(turn_line(turn, chat), style="dim"))
    if turn.dropped_tokens:
        say_note(
            console,
            f"the chat template has rewritten {turn.dropped_tokens:,} tokens of what was held, so "
            "that they were prefilled again",
        )
    if turn.is_full:
        say_note(
            console,
            f"the chat is full with {chat.max_tokens:,} tokens: /save PATH keeps it, /clear begins "
            "anew, and a larger --max-context goes as far as the model's positions",
        )
    elif turn.output.finish_reason == "length":
        say_note(
            console,
            "the answer was cut (--max-new-tokens makes it longer); ask the model to go on",
        )


def show_resumed(console: Console, chat: "Conversation") -> None:
    """Say what of a stored chat is here."""
    turns = sum(each["role"] == "assistant" for each in chat.messages)
    _print(
        console,
        plain(
            f"{turns:,} turn{'s' * (turns != 1)} in {len(chat.tokens):,} tokens resumed from "
            f"{chat.folder}; nothing was prefilled"
        ),
    )
    for text in chat.attached:
        console.print(plain(f"{text.splitlines()[0]} comes in front of your next message"))


def say_note(console: Console, text: str) -> None:
    """Print what a user should know."""
    _print(console, Text.assemble(("note: ", "bold yellow"), plain(text)))


def _print(console: Console, line: Text) -> None:
    """Print a line: folded between words at a terminal, whole in a pipe."""
    console.print(line, soft_wrap=not console.is_terminal)


def stats_rows(chat: "Conversation") -> dict[str, str]:
    """What `/stats` shows, by what it is."""
    counts, memory, stats = chat.counts, chat.cache.report(), chat.cache.stats
    prefilled = f"{counts.prefilled_tokens:,} tokens in this process"
    if counts.dropped_tokens:
        prefilled += f", of them {counts.dropped_tokens:,} rewritten since"
    rows = {
        "turns": f"{counts.turns:,}",
        "held": f"{len(chat.tokens):,} of {chat.max_tokens:,} tokens",
        "restored": f"{counts.restored_tokens:,} tokens, from what was saved",
        "prefilled": prefilled,
        "decoded": f"{counts.decoded_tokens:,} tokens",
        "policy": chat.cache.policy.name,
        "KV cache lies on": chat.cache.store_description,
        "full KV cache": f"{format_bytes(memory.full_cache_bytes)} at {chat.max_tokens:,} tokens",
        "held in memory": f"{format_bytes(memory.used_bytes)} of a budget of "
        f"{format_bytes(memory.limit_bytes)}",
        "read": f"{format_bytes(stats.prefill.read_bytes)} in prefill, "
        f"{format_bytes(stats.decode.read_bytes + stats.verify.read_bytes)} in decode",
        "saved in": "nowhere yet" if chat.folder is None else str(chat.folder),
    }
    if not counts.restored_tokens:
        del rows["restored"]
    if stats.decode.units_wanted:
        rows["hit rate"] = f"{100 * stats.decode.hit_rate:.0f} % of the wanted units were in memory"
    return rows


def show_stats(console: Console, chat: "Conversation") -> None:
    """Print the figures of a chat as a table."""
    table = Table(show_header=False, border_style="dim")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for what, figure in stats_rows(chat).items():
        table.add_row(what, plain(figure))
    print_table(console, table)
