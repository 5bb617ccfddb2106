"""Questions behind a stored text: encoding, and the checks that come before the first answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from penstock.core.errors import ConfigError
from penstock.generation.default_params import default_sampling_params
from penstock.generation.prompts import Prompt, as_prompt_list, check_prompt, encode, text_in
from penstock.generation.sampling import SamplingParams
from penstock.models.loader import LoadedModel
from penstock.models.model_shape import inspect_model

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
"""For all questions, or one for each; None: as the model's own generation config has them."""


class Question(NamedTuple):
    """One question; `text` is None where it came as token ids."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    """Of its answer, checked."""
    max_tokens: int
    """Most tokens of an answer."""


def encode_questions(
    loaded: LoadedModel, questions: Prompt | Sequence[Prompt], params: Params, *,
    held_tokens: int, adds_up: bool,
) -> list[Question]:  # fmt: skip
    """Encode questions and check each as far as that can be known before one is answered.

    Args:
        held_tokens: of the text in front.
        adds_up: each question comes behind the former ones and their answers, of whatever length
            they will be.

    Raises:
        PromptError: a question is empty, holds an unknown token id, is too long behind the text, or
            is text while there is no tokenizer.
        ConfigError: settings are more or fewer than questions, or a text cannot be kept with them.
    """
    prompts = as_prompt_list(questions)
    several = _each(loaded, params, len(prompts))
    encoded = []
    for number, (prompt, each) in enumerate(zip(prompts, several, strict=True)):
        which = "the question" if len(prompts) == 1 else f"question {number + 1}"
        if adds_up and each.num_answers > 1:
            raise ConfigError("one answer to a question is kept, not several: set n=1")
        if each.truncate_prompt_tokens is not None or each.prompt_logprobs is not None:
            raise ConfigError(
                "truncate_prompt_tokens and prompt_logprobs are for prompts that are read whole, "
                "and the text is stored; leave them out"
            )
        ids = encode(loaded, prompt, what="a question", alone=False)
        check_prompt(loaded, which, ids, new_tokens=each.max_tokens or 1, held_tokens=held_tokens)
        room = inspect_model(loaded.model).max_positions - held_tokens - len(ids)
        held_tokens += len(ids) if adds_up else 0
        encoded.append(Question(text_in(prompt), ids, each, each.max_tokens or room))
    return encoded


def _each(loaded: LoadedModel, params: Params, count: int) -> list[SamplingParams]:
    """Settings for each question."""
    if params is None:
        params = default_sampling_params(loaded.model)
    several = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(several) != count:
        raise ConfigError(
            f"there are {count} questions and {len(several)} sampling_params; give one for each, "
            "or one for all"
        )
    return [replace(each) for each in several]
