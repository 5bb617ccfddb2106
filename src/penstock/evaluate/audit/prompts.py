"""Prompts of an audit: texts encoded as one batch, and texts cut in two, to be followed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.core.errors import ConfigError, PromptError
from penstock.evaluate.tasks.english.prompt_fit import Prompter
from penstock.generation.prompts import PromptBatch, make_batch
from penstock.models.loader import LoadedModel

_SHORTEST_PROMPT = 16


def read_prompts(
    loaded: LoadedModel, texts: Sequence[str], *, chat: bool, new_tokens: int
) -> PromptBatch:
    """Encode texts as one batch.

    Raises:
        ConfigError: there is no chat template.
        PromptError: a text is empty or does not fit the model.
    """
    prompts: list[str | list[int]] = list(texts)
    if chat:
        if loaded.tokenizer is None:
            raise ConfigError(f"{loaded.name} has no tokenizer, so that it has no chat template")
        prompter = Prompter(loaded.tokenizer, chat=True)
        prompts = [list(prompter.ids(prompter.render(t, ""))) if t.strip() else t for t in texts]
    return make_batch(loaded, prompts, new_tokens=new_tokens, pad_token_id=_pad(loaded))


def split_texts(
    loaded: LoadedModel, texts: Sequence[str], *, new_tokens: int
) -> tuple[PromptBatch, Tensor]:
    """Encode texts and cut each in two: a prompt, and the tokens behind it to be decoded.

    Args:
        new_tokens: how many of each text's last tokens are decoded.

    Returns:
        The prompts as one batch, and what follows them. int64 [batch, new_tokens]

    Raises:
        PromptError: a text has hardly more tokens than that, or does not fit the model.
    """
    whole = make_batch(loaded, list(texts), new_tokens=0, pad_token_id=_pad(loaded)).token_ids
    shortest = min(map(len, whole))
    if shortest < new_tokens + _SHORTEST_PROMPT:
        raise PromptError(
            f"a text of {shortest:,} tokens cannot be followed for --max-new-tokens {new_tokens}; "
            "give a longer one, or fewer steps"
        )
    ids = [row[:-new_tokens] for row in whole]
    prompt = make_batch(loaded, ids, new_tokens=new_tokens, pad_token_id=_pad(loaded))
    return prompt, torch.tensor([row[-new_tokens:] for row in whole])


def _pad(loaded: LoadedModel) -> int:
    return int((None if loaded.tokenizer is None else loaded.tokenizer.pad_token_id) or 0)
