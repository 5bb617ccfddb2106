"""Prompts as a batch: encoding, the checks that come before any work, and left padding."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.core.errors import PromptError
from penstock.core.regular_file import TEXT_BYTES_MAX, read_regular
from penstock.models.loader import LoadedModel
from penstock.models.model_shape import inspect_model

Prompt: TypeAlias = str | Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBatch:
    """Prompts padded on the left to one length."""

    texts: list[str | None]
    token_ids: list[list[int]]
    input_ids: Tensor
    """int64. [batch, tokens]"""
    attention_mask: Tensor
    """int64, 0 on padding. [batch, tokens]"""

    @property
    def padded_tokens(self) -> int:
        """Length of every row."""
        return int(self.input_ids.shape[1])


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


def require_text(text: str, what: str) -> None:
    """Refuse text with halves of characters, as a shell's bytes that are not UTF-8 become.

    Raises:
        PromptError: says what it is.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"{what} is not UTF-8 text") from error


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one was given or several.

    Raises:
        PromptError: the list is empty, or what was given is no prompt.
    """
    if isinstance(prompts, str):
        return [prompts]
    _require_list(prompts)
    items: list[Any] = list(prompts)
    if not items:
        raise PromptError("there is no prompt: it has zero tokens")
    if all(map(_is_token, items)):
        return [items]
    if any(map(_is_token, items)):
        raise PromptError("token ids stand beside other prompts; give them in a list of theirs")
    return items


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
    loaded: LoadedModel, prompt: Prompt, *, what: str = "the prompt", alone: bool = True
) -> list[int]:
    """Token ids of a prompt; none for blank text.

    Args:
        what: it is, for messages.
        alone: with the tokens that the tokenizer puts around a text.

    Raises:
        PromptError: it is text while there is no tokenizer, or no text that UTF-8 can hold, or
            something among its token ids is none.
    """
    if not isinstance(prompt, str):
        _require_list(prompt)
        for token in prompt:
            if not _is_token(token):
                raise PromptError(f"{what} holds a {type(token).__name__} among its token ids")
        return [int(token) for token in prompt]
    require_text(prompt, what)
    if loaded.tokenizer is None:
        raise PromptError(f"{loaded.name} came without a tokenizer; give {what} as token ids")
    # Blank text would still get the tokens that the tokenizer itself adds, such as <bos>.
    if not prompt.strip():
        return []
    encoded = loaded.tokenizer(prompt, add_special_tokens=alone, verbose=False)
    return [int(token) for token in encoded["input_ids"]]


def make_batch(
    loaded: LoadedModel, prompts: Sequence[Prompt], *, new_tokens: int, pad_token_id: int
) -> PromptBatch:
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
    longest = max(len(ids) for ids in token_ids)
    input_ids = torch.full((len(token_ids), longest), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(token_ids):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids, dtype=torch.int64)
        attention_mask[row, longest - len(ids) :] = 1
    return PromptBatch(
        texts=[prompt if isinstance(prompt, str) else None for prompt in prompts],
        token_ids=token_ids,
        input_ids=input_ids,
        attention_mask=attention_mask,
    )


def check_prompt(
    loaded: LoadedModel, which: str, ids: Sequence[int], *, new_tokens: int, held_tokens: int = 0
) -> None:
    """Refuse what cannot be run, by name.

    Args:
        which: prompt it is, for the message.
        held_tokens: of a stored text in front of it.

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
    if total + new_tokens > limit:
        behind = f" behind {held_tokens:,} of the text" if held_tokens else ""
        raise PromptError(
            f"{which} has {len(ids):,} tokens{behind} and {new_tokens:,} more are asked for, but "
            f"{loaded.name} has {limit:,} positions; take away {total + new_tokens - limit:,}"
        )
