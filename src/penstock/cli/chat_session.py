"""ChatSession: a chat at a terminal or in a pipe, its commands, and Ctrl-C."""

import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO, TypeAlias

from rich.console import Console

from penstock.cli.chat_screen import (
    TurnScreen,
    say_note,
    show_resumed,
    show_stats,
    show_turn,
)
from penstock.cli.console import plain
from penstock.cli.doc_screen import RepairProgress
from penstock.cli.generate import in_home
from penstock.cli.screen import LateProgress
from penstock.core.byte_size import format_bytes
from penstock.core.errors import ConfigError, PenstockError, PromptError

if TYPE_CHECKING:
    from penstock.documents.conversation import Conversation
    from penstock.generation.sampling import SamplingParams

COMMANDS = {
    "/file": ("PATH", "read a text file in, as the beginning of your next message"),
    "/image": ("PATH", "show a picture with your next message"),
    "/video": ("PATH", "show a video, or a folder of frames, with your next message"),
    "/save": ("[PATH]", "store the chat; again to the same folder stores what is new"),
    "/resume": ("PATH", "go on with a stored chat; nothing of it is prefilled"),
    "/stats": ("", "tokens, memory and reads so far"),
    "/system": ("[TEXT]", "show the system prompt, or set it; the chat is prefilled anew"),
    "/clear": ("", "forget all but the system prompt"),
    "/help": ("", "these lines"),
    "/exit": ("", "end; so does Ctrl-D"),
}
"""By name: what stands behind it, and what it does."""
_ENDS = ("/exit", "/quit", "/bye")
_HELP = (
    'Several lines: between """ and """, or with a \\ at the end of each but the last.',
    "Ctrl-C stops an answer and keeps the chat; at the prompt it clears the line.",
)

OpenStored: TypeAlias = "Callable[[Path, Callable[[int, int], None]], Conversation]"
"""Opens a stored chat; reports what of it is damaged and prefilled again."""


class ChatSession:
    """Takes messages and commands until they end.

    Args:
        chat: that is talked in; None as long as none is resumed.
        open_stored: opens another one.
        params: of the answers.
        console: for all but the answers.
        out: for the answers.
        is_terminal: a person is there: an error or a Ctrl-C ends a turn and not the chat.
        session: folder that every turn is stored in, if one.
    """

    def __init__(
        self, chat: "Conversation | None", open_stored: OpenStored, params: "SamplingParams", *,
        console: Console, out: TextIO, is_terminal: bool, session: Path | None = None,
    ) -> None:  # fmt: skip
        self._now, self._open, self._params = chat, open_stored, params
        self._console, self._out = console, out
        self._is_terminal, self._session = is_terminal, session
        self._images: list[Path] = []
        self._videos: list[Path] = []
        self._actions: dict[str, Callable[[str], object]] = {
            "/file": self._file, "/image": self._image, "/video": self._video,
            "/save": self._save, "/resume": self._resume, "/stats": self._stats,
            "/system": self._system, "/clear": self._clear, "/help": self._help,
        }  # fmt: skip

    @property
    def _chat(self) -> "Conversation":
        assert self._now is not None, "begun or resumed"
        return self._now

    def __enter__(self) -> "ChatSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._now is not None:
            self._now.close()

    def greet(self, model: str) -> None:
        """Say on a terminal what there is."""
        if not self._is_terminal:
            return
        for notice in self._chat.notices:
            say_note(self._console, notice)
        most = self._chat.max_tokens
        self._console.print(plain(f"{model}, a chat of up to {most:,} tokens; /help says more"))

    def run(self, messages: Iterable[str]) -> None:
        """Answer messages and obey commands.

        Raises:
            PenstockError: a turn or a command failed, where no person is there.
        """
        for message in messages:
            if message in _ENDS:
                return
            try:
                self.take(message)
            except PenstockError as error:
                if not self._is_terminal:
                    raise
                line = plain(f"error: {' '.join(str(error).split())}", "red")
                self._console.print(line, soft_wrap=True)
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                self._console.print(plain("stopped; the chat is as it was before"))

    def take(self, message: str) -> None:
        """Answer a message, or obey a command.

        Raises:
            ConfigError: there is no such command, or it lacks something.
            As for `Conversation`.
        """
        if not message.startswith("/"):
            self._answer(message)
            return
        name, _, rest = message.partition(" ")
        rest = rest.strip()
        if name == "/?":
            name = "/help"
        if name not in COMMANDS:
            raise ConfigError(f"there is no command {name}; /help lists them")
        wanted = COMMANDS[name][0]
        if wanted and not wanted.startswith("[") and not rest:
            raise ConfigError(f"{name} needs a {wanted}: {name} {wanted}")
        if not wanted and rest:
            raise ConfigError(f"{name} takes nothing behind it; /help lists the commands")
        self._actions[name](rest)

    def _answer(self, message: str) -> None:
        with (
            StopOnInterrupt(active=self._is_terminal) as stop,
            TurnScreen(self._console, self._out) as screen,
        ):
            turn = self._chat.ask(
                message, self._params, on_text=screen.on_text, on_tokens=screen.on_tokens,
                on_index=screen.on_index, should_stop=stop.should_stop, images=self._images,
                videos=self._videos,
            )  # fmt: skip
            self._images, self._videos = [], []
            screen.on_text("")  # an empty answer is a line, too
        show_turn(self._console, turn, self._chat)
        if self._session is not None:
            self._store(self._session)

    # Commands ---------------------------------------------------------------------------------

    def read_file(self, path: Path) -> None:
        """Read a text file in.

        Raises:
            PromptError: it cannot be read or is empty, or the chat is full.
        """
        from penstock.generation.prompts import read_text_file

        text = read_text_file(path, "file")
        if not text.strip():
            raise PromptError(f"file {path} is empty")
        with TurnScreen(self._console, self._out) as screen:
            count = self._chat.attach(
                f"--- File: {path.name} ---\n{text}", on_tokens=screen.on_tokens
            )
        self._console.print(
            plain(f"{path.name} is in ({count:,} tokens prefilled); your next message is about it")
        )

    def _file(self, path: str) -> None:
        self.read_file(in_home(Path(path), "/file"))

    def show(self, images: Iterable[Path], videos: Iterable[Path]) -> None:
        """Have pictures and videos with the next message."""
        self._images += images
        self._videos += videos

    def _image(self, path: str) -> None:
        self.show([in_home(Path(path), "/image")], [])

    def _video(self, path: str) -> None:
        self.show([], [in_home(Path(path), "/video")])

    def _save(self, path: str) -> None:
        folder = in_home(Path(path), "/save") if path else self._chat.folder
        if folder is None:
            raise ConfigError("/save needs a PATH the first time: /save PATH")
        written = self._store(folder)
        self._console.print(
            plain(f"saved {len(self._chat.tokens):,} tokens in {folder}, {format_bytes(written)} "
                  f"written; /resume {folder} goes on from here"),
            soft_wrap=True,
        )  # fmt: skip

    def _store(self, folder: Path) -> int:
        progress = LateProgress(self._console, "save")
        try:
            return self._chat.save(
                folder, on_bytes=lambda done, total: progress.update(done / max(total, 1))
            )
        finally:
            progress.stop()

    def resume(self, folder: Path) -> None:
        """Go on with a stored chat instead.

        Raises:
            As for `Conversation.resume`.
        """
        with RepairProgress(self._console) as progress:
            chat = self._open(folder, progress.update)
        if self._now is not None:
            self._now.close()
        self._now = chat
        show_resumed(self._console, chat)

    def _resume(self, path: str) -> None:
        self.resume(in_home(Path(path), "/resume"))

    def _stats(self, _: str) -> None:
        show_stats(self._console, self._chat)

    def _system(self, text: str) -> None:
        if not text:
            self._console.print(plain(self._chat.system or "the chat template's own, if any"))
            return
        self._chat.system = text
        if held := len(self._chat.tokens):
            say_note(self._console, f"the next message prefills the chat again, {held:,} tokens")

    def _clear(self, _: str) -> None:
        self._images, self._videos = [], []
        self._chat.clear()
        self._console.print(plain("the chat is empty"))

    def _help(self, _: str) -> None:
        width = max(len(f"{name} {what}") for name, (what, _) in COMMANDS.items())
        lines = [f"{f'{name} {what}':<{width}}  {does}" for name, (what, does) in COMMANDS.items()]
        for line in (*lines, *_HELP):
            self._console.print(plain(line))


class StopOnInterrupt:
    """A block in which Ctrl-C ends the answer behind its next token; before the first one, and the
    second time, it is a KeyboardInterrupt.

    Args:
        active: false: Ctrl-C stays what it is.
    """

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._answers = self._is_wanted = False

    def __enter__(self) -> "StopOnInterrupt":
        if self._active:
            self._former = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._former)

    def should_stop(self) -> bool:
        """For `Conversation.ask`."""
        self._answers = True
        return self._is_wanted

    def _press(self, *_: object) -> None:
        if not self._answers or self._is_wanted:
            raise KeyboardInterrupt
        self._is_wanted = True
