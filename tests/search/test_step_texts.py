"""Step texts: which token completes a delimiter, and what a step left of a text."""

from collections.abc import Sequence

import pytest

from penstock.models.loader import LoadedModel, load
from penstock.search.step_texts import StepTexts, text_kept


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    return load("recall")


def test_a_watch_agrees_with_the_text_at_every_token(bundled: LoadedModel) -> None:
    """With and without the short cut over single tokens, which a final space rules out."""
    tokenizer = bundled.tokenizer
    assert tokenizer is not None
    ids = [i % 40 + 20 for i in range(0, 400, 7)] + list(tokenizer("a b . c . d")["input_ids"])

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    for text in (".", " .", ". ", decode(ids[3:5])):
        watch = StepTexts(tokenizer, delimiter=text, stop_texts=["never to be found"])
        found = [at for at in range(1, len(ids) + 1) if watch.ends_step(ids[:at])]
        counts = [decode(ids[:at]).count(text) for at in range(len(ids) + 1)]
        assert found == [at for at in range(1, len(ids) + 1) if counts[at] > counts[at - 1]]
        assert not any(watch.ends_beam(ids[:at]) for at in range(1, len(ids) + 1))


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("", "ab", 0),
        ("ab", "abc", 2),
        ("a\ufffd", "a\u00e9 b", 1),
        ("abc", "ab", 2),
        ("abc", "xy", 0),
    ],
)
def test_text_kept(before: str, after: str, kept: int) -> None:
    assert text_kept(before, after) == kept
