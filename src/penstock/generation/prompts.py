"""Prompts as a batch: encoding, the checks that come before any work, and left padding."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict

import torch
from torch import Tensor

from penstock.core.errors import PromptError
from penstock.core.printable import require_text
from penstock.core.regular_file import TEXT_BYTES_MAX, read_regular
from penstock.models.loader import LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.models.processing import Drawn, Media, encode_with_media
from penstock.models.visuals import Visual, processed_visuals

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any] | Tensor
"""A text, token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or what a tokenizer makes of
a text: `{"input_ids": ids, "attention_mask": mask}`, ids in one more list or not. Pictures come as
`{"prompt": text, "multi_modal_data": {"image": [...], "video": [...]}}`, at the placeholders in the
text, or as what the model's processor makes of one prompt."""

_OTHER_INPUTS = ("mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds",
                 "encoder_prompt", "decoder_prompt", "cache_salt")  # fmt: skip
_UNREAD = ("token_type_ids", "special_tokens_mask", "length")
"""What tokenizers add, and no decoder reads."""


class TextPrompt(TypedDict):
    """A prompt as a text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """The text that they are of; only handed back."""


class TokenIds(list[int]):
    """Token ids that came with their text, or with pictures."""

    def __init__(
        self, ids: Iterable[int], text: str | None = None, visuals: Sequence[Visual] = ()
    ) -> None:
        """Keep them."""
        super().__init__(ids)
        self.text, self.visuals = text, tuple(visuals)


class TextWithMedia(str):
    """A text with the pictures and videos that stand at its placeholders, in order."""

    media: tuple[Media | Drawn, ...] = ()

    @classmethod
    def of(cls, text: str, media: Sequence[Media | Drawn]) -> "TextWithMedia":
        """Put them together."""
        made = cls(text)
        made.media = tuple(media)
        return made


class ProcessedIds(list[int]):
    """Token ids of a processor, with all else that it made."""

    def __init__(self, ids: Iterable[int], made: Mapping[str, Any]) -> None:
        """Keep both."""
        super().__init__(ids)
        self.made = made


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBatch:
    """Prompts padded on the left to one length."""

    texts: list[str | None]
    token_ids: list[list[int]]
    input_ids: Tensor
    """int64. [batch, tokens]"""
    attention_mask: Tensor
    """int64, 0 on padding. [batch, tokens]"""
    visuals: list[tuple[Visual, ...]] = field(default_factory=list)
    """By row: its pictures, in places of the row without its padding. Empty: no row has any."""

    @property
    def padded_tokens(self) -> int:
        """Length of every row."""
        return int(self.input_ids.shape[1])

    def take(self, rows: Tensor) -> "PromptBatch":
        """The batch whose row i is row `rows[i]` of this one."""
        numbers = rows.tolist()
        return PromptBatch(
            texts=[self.texts[row] for row in numbers],
            token_ids=[self.token_ids[row] for row in numbers],
            input_ids=self.input_ids[rows],
            attention_mask=self.attention_mask[rows],
            visuals=[self.visuals[row] for row in numbers] if self.visuals else [],
        )


def read_text_file(path: str | Path, what: str = "prompt file") -> str:
    """Read a UTF-8 text file; `what` names it in errors.

    Raises:
        PromptError: it is missing, cannot be read, or is not text.
    """
    try:
        content = read_regular(path, TEXT_BYTES_MAX)
    except OSError as error:
        raise PromptError(f"cannot read {what} {path}: {error.strerror or error}") from error
    return decode_text(content, f"{what} {path}")


def decode_text(content: bytes, what: str) -> str:
    """Decode UTF-8; `what` names it in errors.

    Raises:
        PromptError: it is not text.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{what} is not UTF-8 text") from error


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[str | Sequence[int]]:
    """A list of texts and lists of token ids, whether one prompt was given or several.

    Raises:
        PromptError: the list is empty, or what was given is no prompt.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return _in_mapping(prompts)
    _require_list(prompts)
    items: list[Any] = list(prompts)
    if not items:
        raise PromptError("there is no prompt: it has zero tokens")
    if all(map(_is_token, items)):
        return [items]
    if any(map(_is_token, items)):
        raise PromptError("token ids stand beside other prompts; give them in a list of theirs")
    parts = [_in_mapping(item) if isinstance(item, Mapping) else [item] for item in items]
    return [one for part in parts for one in part]


def single_prompt(prompt: Prompt) -> str | Sequence[int]:
    """What was given as one prompt, as an item of a prompt list.

    Raises:
        PromptError: it is none, or several.
    """
    items = as_prompt_list([prompt])
    if len(items) != 1:
        raise PromptError(f"there are {len(items)} prompts; give one")
    return items[0]


def text_in(prompt: str | Sequence[int]) -> str | None:
    """The text of an item of a prompt list, where it came with one."""
    return prompt if isinstance(prompt, str) else getattr(prompt, "text", None)


def visuals_in(ids: Sequence[int]) -> tuple[Visual, ...]:
    """The pictures of encoded tokens, where they came with any."""
    return getattr(ids, "visuals", ())


def first_tokens(ids: Sequence[int], count: int) -> TokenIds:
    """The first `count` tokens with the pictures that begin among them."""
    visuals = [each for each in visuals_in(ids) if each.start < count]
    return TokenIds(ids[:count], visuals=visuals)


def _in_mapping(given: Mapping[str, Any]) -> list[str | Sequence[int]]:
    """The prompts of a mapping: several where it is what a tokenizer makes of several texts.

    Raises:
        PromptError: it has something else, or too much.
    """
    kind = type(given).__name__
    for name in given:
        if name in _OTHER_INPUTS and given[name] is not None:
            raise PromptError(f"prompts of {name} are not supported; give text or token ids")
    has = [name for name in ("prompt", "prompt_token_ids", "input_ids") if name in given]
    if "input_ids" in given and _has_pixels(given):
        return [_of_processor(given)]
    known = {*has, *_OTHER_INPUTS, *_UNREAD, "attention_mask", "multi_modal_data"}
    unknown = next((name for name in given if name not in known), None)
    if not has or unknown is not None:
        what = f"a {kind} with {unknown}" if unknown is not None else f"an empty {kind}"
        raise PromptError(f"{what} is no prompt; it has prompt, prompt_token_ids or input_ids")
    if "input_ids" in given:
        return _in_encoding(given["input_ids"], given.get("attention_mask"))
    text, data = given.get("prompt"), given.get("multi_modal_data")
    if data is not None:
        if not isinstance(text, str) or given.get("prompt_token_ids") is not None:
            raise PromptError("multi_modal_data goes with a prompt that is a text")
        return [TextWithMedia.of(text, Media.of_data(data))]
    if text is not None and not isinstance(text, str):
        raise PromptError(f"prompt is a {type(text).__name__}; it must be a text")
    if given.get("prompt_token_ids") is None:
        if text is None:
            raise PromptError(f"prompt and prompt_token_ids of a {kind} are None")
        return [text]
    return [TokenIds(_ids(given["prompt_token_ids"], "prompt_token_ids"), text)]


def _has_pixels(given: Mapping[str, Any]) -> bool:
    """Whether a processor has made it, of pictures too."""
    return any("pixel" in name and value is not None for name, value in given.items())


def _of_processor(given: Mapping[str, Any]) -> ProcessedIds:
    """What a model's processor made of one prompt."""
    rows = _in_encoding(given["input_ids"], None)
    mask = given.get("attention_mask")
    masks = [] if mask is None else _in_encoding(mask, None)
    if len(rows) != 1 or not all(all(each) for each in masks):
        raise PromptError(
            "a processor's pictures of several prompts cannot be told apart; call it once for each "
            "prompt, without padding"
        )
    [ids] = rows
    return ProcessedIds(_ids(ids, "input_ids"), given)


def _in_encoding(input_ids: Any, attention_mask: Any) -> list[str | Sequence[int]]:
    """Rows of token ids, without what the mask leaves out."""
    _require_list(input_ids)
    rows = list(input_ids)
    is_one = all(map(_is_token, rows))
    rows = [rows] if is_one else rows
    if attention_mask is None:
        return [_ids(row, "input_ids") for row in rows]
    masks = [attention_mask] if is_one else list(attention_mask)
    if [len(row) for row in rows] != [len(mask) for mask in masks]:
        raise PromptError("input_ids and attention_mask are of different lengths")
    return [
        [token for token, kept in zip(_ids(row, "input_ids"), mask, strict=True) if kept]
        for row, mask in zip(rows, masks, strict=True)
    ]


def _require_list(prompt: Any) -> None:
    """Refuse what is no list, or gives something else than tokens: a dict its keys, a text its
    bytes.

    Raises:
        PromptError: says what may be given.
    """
    is_list = isinstance(prompt, Iterable) and not isinstance(prompt, Mapping | bytes | bytearray)
    if not is_list or getattr(prompt, "ndim", 1) == 0:
        raise PromptError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")


def _is_token(item: Any) -> bool:
    """Whether it is a whole number, a tensor's or an array's too."""
    try:
        operator.index(item)
    except TypeError:
        return False
    return getattr(item, "ndim", 0) == 0


def encode(
    loaded: LoadedModel, prompt: str | Sequence[int], *, what: str = "the prompt",
    alone: bool = True,
) -> list[int]:  # fmt: skip
    """Token ids of a prompt; none for blank text. Those of a prompt with pictures are `TokenIds`.

    Args:
        what: it is, for messages.
        alone: with the tokens that the tokenizer puts around a text.

    Raises:
        PromptError: it is text while there is no tokenizer, or no text that UTF-8 can hold, or
            something among its token ids is none; or its pictures cannot be read, or the model
            takes none.
    """
    if isinstance(prompt, ProcessedIds):
        ids = _ids(prompt, what)
        return TokenIds(ids, visuals=processed_visuals(loaded.model, ids, prompt.made))
    if not isinstance(prompt, str):
        ids = _ids(prompt, what)
        return TokenIds(ids, text_in(prompt), visuals_in(prompt)) if visuals_in(prompt) else ids
    require_text(prompt, what)
    if loaded.tokenizer is None:
        raise PromptError(f"{loaded.name} came without a tokenizer; give {what} as token ids")
    if isinstance(prompt, TextWithMedia) and prompt.media:
        encoded = encode_with_media(loaded, prompt, prompt.media, alone=alone)
        return TokenIds(encoded.ids, str(prompt), encoded.visuals)
    # Blank text would still get the tokens that the tokenizer itself adds, such as <bos>.
    if not prompt.strip():
        return []
    encoded = loaded.tokenizer(prompt, add_special_tokens=alone, verbose=False)
    return [int(token) for token in encoded["input_ids"]]


def _ids(prompt: Any, what: str) -> list[int]:
    """Token ids as whole numbers of Python."""
    _require_list(prompt)
    for token in prompt:
        if not _is_token(token):
            raise PromptError(f"{what} holds a {type(token).__name__} among its token ids")
    return [int(token) for token in prompt]


def make_batch(
    loaded: LoadedModel, prompts: Sequence[str | Sequence[int]], *, new_tokens: int,
    pad_token_id: int,
) -> PromptBatch:  # fmt: skip
    """Encode prompts and pad them on the left.

    Args:
        loaded: the model, for its limits, and its tokenizer.
        prompts: texts, or token ids; at least one.
        new_tokens: most tokens that will be generated behind each prompt.
        pad_token_id: fills the left; never attended to.

    Raises:
        PromptError: a prompt has no tokens, holds an unknown token id, does not fit the model's
            positions, or is text while there is no tokenizer.
    """
    token_ids = [encode(loaded, prompt) for prompt in prompts]
    for row, ids in enumerate(token_ids):
        which = "the prompt" if len(token_ids) == 1 else f"prompt {row}"
        check_prompt(loaded, which, ids, new_tokens=new_tokens)
    return padded([text_in(prompt) for prompt in prompts], token_ids, pad_token_id)


def padded(
    texts: Sequence[str | None], token_ids: Sequence[list[int]], pad_token_id: int
) -> PromptBatch:
    """Prompts that are encoded and checked, as one batch."""
    longest = max(len(ids) for ids in token_ids)
    input_ids = torch.full((len(token_ids), longest), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(token_ids):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids, dtype=torch.int64)
        attention_mask[row, longest - len(ids) :] = 1
    visuals = [visuals_in(ids) for ids in token_ids]
    return PromptBatch(
        texts=list(texts),
        token_ids=list(token_ids),
        input_ids=input_ids,
        attention_mask=attention_mask,
        visuals=visuals if any(visuals) else [],
    )


def check_prompt(
    loaded: LoadedModel, which: str, ids: Sequence[int], *, new_tokens: int, held_tokens: int = 0,
    most_tokens: int | None = None,
) -> None:  # fmt: skip
    """Refuse what cannot be run, by name.

    Args:
        which: prompt it is, for the message.
        held_tokens: of a stored text in front of it.
        most_tokens: of prompt and answer, if less than the model has positions (`max_model_len`).

    Raises:
        PromptError: it has no tokens, holds an unknown token id, or does not fit the positions.
    """
    if not ids:
        raise PromptError(f"{which} is empty: it has zero tokens")
    vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise PromptError(f"{which} holds token id {wrong}, but {loaded.name} has {vocabulary}")
    limit, total = inspect_model(loaded.model).max_positions, held_tokens + len(ids)
    room = f"{loaded.name} has {limit:,} positions"
    if most_tokens is not None and most_tokens < limit:
        limit, room = most_tokens, f"max_model_len is {most_tokens:,}"
    if total + new_tokens > limit:
        behind = f" behind {held_tokens:,} of the text" if held_tokens else ""
        raise PromptError(
            f"{which} has {len(ids):,} tokens{behind} and {new_tokens:,} more are asked for, but "
            f"{room}; take away {total + new_tokens - limit:,}"
        )
