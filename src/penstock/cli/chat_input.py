"""Messages of a chat from a terminal, with line editing where there is readline, or from a pipe."""

import glob
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from penstock.core.errors import PromptError

PROMPT = "> "
_MORE = ". "
_QUOTES = '"""'


class ChatInput:
    """Reads messages: a line each, or several lines between triple quotes, or ended by backslashes.

    What was typed is kept for the arrow keys until the process ends, and never written to a disk.
    """

    def __init__(self, source: TextIO, *, prompts: TextIO | None, commands: Sequence[str]) -> None:
        """Read from a source.

        Args:
            source: stdin.
            prompts: where prompts go; None: there are none.
            commands: that the tabulator key completes.
        """
        self._source, self._prompts = source, prompts
        self._edits = prompts is sys.stdout and source is sys.stdin and _edit_lines(commands)

    def __iter__(self) -> Iterator[str]:
        """Messages until the source ends; a Ctrl-C at the prompt clears what was begun."""
        while True:
            try:
                message = self._message()
            except EOFError:
                if self._prompts is not None:
                    print(file=self._prompts)
                return
            except KeyboardInterrupt:
                if self._prompts is None:
                    raise
                print(file=self._prompts)
                continue
            if message.strip():
                yield message.strip()

    def _message(self) -> str:
        line = self._line(PROMPT)
        if line.lstrip().startswith(_QUOTES):
            return self._quoted(line.lstrip()[len(_QUOTES) :])
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(_MORE))
        return "\n".join(lines)

    def _quoted(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(_QUOTES):
            lines.append(line)
            line = self._line(_MORE)
        lines.append(line.rstrip()[: -len(_QUOTES)])
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        """One line, without its end.

        Raises:
            EOFError: there is none.
            PromptError: it is no text.
        """
        try:
            if self._edits:
                return input(prompt)
            if self._prompts is not None:
                self._prompts.write(prompt)
                self._prompts.flush()
            line = self._source.readline()
        except UnicodeDecodeError as error:
            raise PromptError("a message is not UTF-8 text") from error
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


def _edit_lines(commands: Sequence[str]) -> bool:
    """Have line editing for `input`, with commands and paths completed; whether there is any."""
    try:
        import readline
    except ImportError:  # Windows
        return False
    readline.set_auto_history(True)
    readline.set_completer_delims(" ")
    readline.set_completer(_Completer(commands, readline))
    libedit = "libedit" in (readline.__doc__ or "")  # macOS
    readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
    return True


class _Completer:
    """Completes a command at the beginning of a line, and paths behind it."""

    def __init__(self, commands: Sequence[str], readline: Any) -> None:
        self._commands, self._readline = commands, readline

    def __call__(self, text: str, state: int) -> str | None:
        """The `state`-th completion of the last word."""
        if self._readline.get_begidx() == 0:
            found = [each for each in self._commands if each.startswith(text)]
        elif self._readline.get_line_buffer().startswith("/"):
            found = sorted(glob.glob(f"{glob.escape(text)}*"))
        else:
            found = []
        return found[state] if state < len(found) else None
