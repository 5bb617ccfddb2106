"""Texts that ship with the package, for any model: prose, code and dialogue of free licence."""

from contextlib import suppress
from itertools import cycle

import torch
from torch import Tensor

from penstock.core.errors import PromptError
from penstock.generation.chat_template import ChatTemplate, has_chat_template
from penstock.generation.prompts import encode
from penstock.models.calibration_text import (
    MOST_UNKNOWN,
    TEXTS,
    code,
    dialogue,
    prose,
    unknown_share,
)
from penstock.models.loader import LoadedModel

__all__ = ["TEXTS", "shipped_texts"]


def shipped_texts(loaded: LoadedModel, tokens: int) -> dict[str, Tensor]:
    """The beginnings of prose, code and a dialogue, as a model reads them.

    The code is that of the installed Python's standard library. The dialogue goes through the
    tokenizer's chat template where it has one; its paragraphs are the turns of two speakers.

    Args:
        tokens: of each, at most.

    Returns:
        Token ids by kind, int64. [tokens]

    Raises:
        PromptError: the model came without a tokenizer, or knows hardly a word of all this.
    """
    if loaded.tokenizer is None:
        raise PromptError(f"{loaded.name} came without a tokenizer, so that no text can be read")
    ids = {
        "prose": encode(loaded, prose()),
        "code": encode(loaded, code()),
        "dialogue": _dialogue(loaded),
    }
    texts = {kind: torch.tensor(each[:tokens], dtype=torch.int64) for kind, each in ids.items()}
    for kind, each in texts.items():
        share = unknown_share(each.tolist(), loaded.tokenizer)
        if share > MOST_UNKNOWN:
            raise PromptError(
                f"{share:.0%} of the {kind} that ships is unknown words to {loaded.name}; give "
                "--text FILE, of the kind that will be read"
            )
    return texts


def _dialogue(loaded: LoadedModel) -> list[int]:
    text = dialogue()
    if has_chat_template(loaded.tokenizer):
        turns = zip(cycle(("user", "assistant")), text.split("\n\n"), strict=False)
        messages = [{"role": role, "content": content} for role, content in turns]
        with suppress(PromptError):  # a template of another kind of talk
            rendered = ChatTemplate().render(
                loaded.tokenizer, messages, add_generation_prompt=False
            )
            return encode(loaded, rendered, alone=False)
    return encode(loaded, text)
