"""Questions behind a stored text: encoding, and the checks that come before the first answer."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.generation.prompts import Prompt, as_prompt_list, check_prompt, encode
from penstock.models.loader import LoadedModel


class Question(NamedTuple):
    """One question; `text` is None where it came as token ids."""

    text: str | None
    token_ids: list[int]


def encode_questions(
    loaded: LoadedModel, questions: Prompt | Sequence[Prompt], *, held_tokens: int,
    new_tokens: int, adds_up: bool,
) -> list[Question]:  # fmt: skip
    """Encode questions and check each as far as that can be known before one is answered.

    Args:
        held_tokens: of the text in front.
        new_tokens: most of an answer.
        adds_up: each question comes behind the former ones and their answers, of whatever length
            they will be.

    Raises:
        PromptError: a question is empty, holds an unknown token id, is too long behind the text, or
            is text while there is no tokenizer.
    """
    prompts = as_prompt_list(questions)
    encoded = []
    for number, prompt in enumerate(prompts):
        which = "the question" if len(prompts) == 1 else f"question {number + 1}"
        ids = encode(loaded, prompt, what="a question", alone=False)
        check_prompt(loaded, which, ids, new_tokens=new_tokens, held_tokens=held_tokens)
        held_tokens += len(ids) if adds_up else 0
        encoded.append(Question(prompt if isinstance(prompt, str) else None, ids))
    return encoded
