"""Asked: what a command line asks: a text, or messages for the model's chat template."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from penstock.generation.engine import LLM
    from penstock.generation.output import RequestOutput
    from penstock.generation.sampling import SamplingParams
    from penstock.models.loader import LoadedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A prompt out of a command line."""

    text: str | None
    """None: there are messages."""
    messages: tuple[dict[str, Any], ...]
    """A conversation, or what stands in front of the text."""
    raw: bool
    """The text is given to the model as it is."""
    images: tuple[Path, ...] = ()
    """In front of the text, unless it has placeholders; then the videos."""
    videos: tuple[Path, ...] = ()

    @classmethod
    def of(
        cls, prompt: str | None, prompt_file: Path | None, messages: Path | None, *,
        system: str | None, raw: bool, images: Sequence[Path] = (), videos: Sequence[Path] = (),
    ) -> "Asked":  # fmt: skip
        """Read what was given.

        Raises:
            ConfigError: nothing or too much was given, or options exclude each other.
            PromptError: a file cannot be read, or holds no text or no messages.
        """
        if (prompt, prompt_file, messages).count(None) != 2:
            raise ConfigError("give the prompt with one of --prompt, --prompt-file and --messages")
        if raw and (system is not None or messages is not None):
            raise ConfigError("--raw is for a plain text; --system and --messages need a template")
        if messages is None:
            text = read_prompt(prompt, prompt_file)
            before = [] if system is None else [{"role": "system", "content": system}]
            return cls(
                text=text, messages=tuple(before), raw=raw, images=tuple(images),
                videos=tuple(videos),
            )  # fmt: skip
        if images or videos:
            raise ConfigError(
                "--image and --video go with a prompt; in --messages, write parts: "
                '{"type": "image", "path": "..."}'
            )
        found = read_messages(messages)
        if system is not None:
            if found[0].get("role") == "system":
                raise ConfigError(
                    f"--messages {messages} begins with a system message already; leave --system "
                    "out"
                )
            found = [{"role": "system", "content": system}, *found]
        return cls(text=None, messages=tuple(found), raw=False)

    def put_to(self, llm: "LLM", params: "SamplingParams", **options: Any) -> "list[RequestOutput]":
        """Ask a model, by its chat template unless the text is raw or there is none.

        Raises:
            ConfigError: messages, or --system, while the model has no template.
            As for `LLM.generate` and `LLM.chat`.
        """
        from penstock.generation.chat_template import has_chat_template, template_owner

        templated = has_chat_template(template_owner(llm.loaded))
        if not templated and self.messages:
            said = "--system" if self.text is not None else "--messages"
            raise ConfigError(
                f"{said} needs a chat template, and this model has none; give all of the text with "
                "--prompt or --prompt-file"
            )
        if self.text is not None and (self.raw or not templated):
            text = with_pictures(llm.loaded, self.text, self.images, self.videos)
            return llm.generate(text, params, **options)
        last = () if self.text is None else ({"role": "user", "content": self._content(self.text)},)
        return llm.chat([*self.messages, *last], params, **options)

    def _content(self, text: str) -> str | list[dict[str, Any]]:
        """Of the last message."""
        parts = [{"type": "image", "path": str(each)} for each in self.images]
        parts += [{"type": "video", "path": str(each)} for each in self.videos]
        return [*parts, {"type": "text", "text": text}] if parts else text


def with_pictures(
    loaded: "LoadedModel", text: str, images: Sequence[Path], videos: Sequence[Path]
) -> str:
    """A text with pictures and videos in front of it, or at its placeholders.

    Raises:
        PromptError: the model takes none.
    """
    from penstock.generation.chat_template import with_media
    from penstock.models.processing import Media

    media = [Media("image", each) for each in images]
    media += [Media("video", each) for each in videos]
    return with_media(loaded, text, media)


def read_messages(path: Path) -> list[dict[str, Any]]:
    """Messages of a JSON file: a list of them, or an object with the list as its "messages".

    Raises:
        PromptError: it cannot be read, or holds something else.
    """
    from penstock.generation.prompts import read_text_file

    what = f"--messages {path}"
    text = read_stdin("the messages") if str(path) == "-" else read_text_file(path, "messages file")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise PromptError(f"{what} is no JSON: {error}") from error
    if isinstance(found, dict):
        found = found.get("messages")
    if not (isinstance(found, list) and found and all(isinstance(each, dict) for each in found)):
        raise PromptError(f'{what} holds no messages; write [{{"role": "user", "content": "..."}}]')
    return found


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from whichever option was given.

    Raises:
        ConfigError: both were given, or neither.
        PromptError: the file cannot be read, or it is no text.
    """
    from penstock.core.printable import require_text
    from penstock.generation.prompts import read_text_file

    if (prompt is None) == (prompt_file is None):
        raise ConfigError("give the prompt with either --prompt or --prompt-file")
    if prompt is not None:
        require_text(prompt, "the prompt")
        return prompt
    assert prompt_file is not None
    if str(prompt_file) == "-":
        return read_stdin("the prompt")
    return read_text_file(prompt_file)


def read_stdin(what: str) -> str:
    """All of stdin; `what` names it in errors.

    Raises:
        PromptError: it is closed, or no text.
    """
    from penstock.generation.prompts import decode_text

    if sys.stdin is None:
        raise PromptError(f"{what} was to come on stdin, which is closed")
    return decode_text(sys.stdin.buffer.read(), f"{what} on stdin")
