"""Pieces of an answer join to its text, and it ends where its settings say, for the reason."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from penstock.generation.answer import Answer, EndTokens
from penstock.generation.answer_text import AnswerText
from penstock.generation.sampler import Choice, SamplingRow
from penstock.generation.sampling import SamplingParams
from penstock.models.loader import load
from penstock.search.step_texts import StepTexts

END = 0
ENDS = EndTokens(primary=END)


class ByteTokenizer:
    """Token ids are bytes, so that one character can take several tokens."""

    def decode(
        self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        del skip_special_tokens
        assert not clean_up_tokenization_spaces
        return bytes(ids).decode("utf-8", errors="replace")


def push_all(text: AnswerText, content: str) -> tuple[list[str], str | None]:
    pieces = []
    for byte in content.encode():
        pieces.append(text.push(byte))
        if text.stopped_by is not None:
            return pieces, text.stopped_by
    return [*pieces, text.finish()], None


def byte_text(*stop: str, **fields: Any) -> AnswerText:
    tokenizer: Any = ByteTokenizer()
    return AnswerText(tokenizer, SamplingParams(stop=stop, **fields))


@pytest.mark.parametrize("content", ["plain", "naïve café", "日本語 text", "🙂🙃 a 🙂"])
def test_pieces_join_to_the_text_and_never_hold_half_a_character(content: str) -> None:
    text = byte_text()
    pieces, _ = push_all(text, content)
    assert "".join(pieces) == content == text.text
    assert "\ufffd" not in "".join(pieces)


def test_a_stop_string_ends_the_text_before_it() -> None:
    text = byte_text("END", "\n\n")
    pieces, stopped = push_all(text, "so EN far\nso ENDgood")
    assert stopped == "END"
    assert "".join(pieces) == "so EN far\nso " == text.text


def test_a_stop_string_can_be_kept() -> None:
    text = byte_text("END", "\n\n", include_stop_str_in_output=True)
    pieces, stopped = push_all(text, "so ENDgood")
    assert (stopped, "".join(pieces), text.text) == ("END", "so END", "so END")


@pytest.mark.parametrize(
    ("stop", "told"),
    [(("cd", "b"), "ab|a"), (("abcd", "bc"), "a|a"), (("b", "ab"), "b|a"), (("ab", "b"), "ab|")],
)
def test_of_several_stop_strings_the_first_that_is_whole_counts(
    stop: tuple[str, ...], told: str
) -> None:
    """Whether they come in one token or in several; of those that end together, the first named."""
    backend = Tokenizer(models.WordLevel({"abcd": 0, "<unk>": 1}, unk_token="<unk>"))
    expected = {"ab|a": ("b", "a"), "a|a": ("bc", "a"), "b|a": ("b", "a"), "ab|": ("ab", "")}[told]
    whole = AnswerText(PreTrainedTokenizerFast(tokenizer_object=backend), SamplingParams(stop=stop))
    whole.push(0)
    assert (whole.stopped_by, whole.text) == expected
    text = byte_text(*stop)
    push_all(text, "abcd")
    assert (text.stopped_by, text.text) == expected


def test_stop_strings_of_the_first_tokens_do_not_count() -> None:
    text = byte_text("ab", min_tokens=2)
    assert push_all(text, "ababc") == (["", "ab", "", ""], "ab")
    assert text.text == "ab"
    across = byte_text("bc", min_tokens=2)  # ends behind them
    assert push_all(across, "abcd")[1] == "bc"
    assert across.text == "a"


def test_what_could_begin_a_stop_string_is_held_back_only_as_long_as_it_could() -> None:
    text = byte_text("END")
    shown = [text.push(byte) for byte in b"aENxE"]
    assert shown == ["a", "", "", "ENx", ""]
    assert text.finish() == "E"


def test_a_special_token_takes_no_space_away() -> None:
    tokenizer = load("recall").tokenizer
    assert tokenizer is not None
    words = tokenizer("The grass is green .", add_special_tokens=False)["input_ids"]
    special = tokenizer.unk_token_id
    ids = [special, words[0], special, special, *words[1:], special]
    text = AnswerText(tokenizer, SamplingParams(stop="is green"))
    pieces = [text.push(token) for token in ids[:5]]
    assert pieces == ["", "The", "", "", " grass"]
    assert [text.push(token) for token in ids[5:7]] == [" ", ""]
    assert text.stopped_by == "is green"
    whole = AnswerText(tokenizer, SamplingParams())
    assert "".join([*(whole.push(token) for token in ids), whole.finish()]) == whole.text
    assert whole.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_tokenizer_that_cleans_up_takes_no_letter_away() -> None:
    """As Llama 3's does in older transformers: " 's" becomes "'s"."""
    backend = Tokenizer(models.BPE({"print": 0, "Ġ'": 1, "sum": 2, "'": 3}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )  # fmt: skip
    assert tokenizer.decode([0, 1, 2, 3]) == "print'sum'"
    text = AnswerText(tokenizer, SamplingParams())
    pieces = [text.push(token) for token in (0, 1, 2, 3)]
    assert pieces == ["print", " '", "sum", "'"]
    assert StepTexts(tokenizer).decode([0, 1, 2, 3]) == "print 'sum'"


def test_a_token_that_ends_in_half_a_character() -> None:
    """What is in front of the half is told, and may complete a stop string."""
    backend = Tokenizer(models.BPE({"so": 0, "EN": 1, "Dâ": 2, "Ĥ¬": 3}, []))  # D, half a €
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = AnswerText(tokenizer, SamplingParams())
    assert [text.push(token) for token in (0, 1, 2, 3, 0)] == ["so", "EN", "D", "€", "so"]
    stopped = Answer(
        SamplingRow(params=SamplingParams(stop="END"), prompt_token_ids=[1]), tokenizer,
        max_tokens=3, ends=EndTokens(),
    )  # fmt: skip
    for token in (0, 1, 2):
        stopped.take(Choice(token, None))
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("so", "stop", "END")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "<|x|><|x|>a<|x|>b"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False},
         "<|x|><|x|>a<|x|>b"),
        ({"detokenize": False}, ""),
    ],
)  # fmt: skip
def test_special_tokens_have_a_text_if_that_is_asked_for(
    fields: dict[str, Any], expected: str
) -> None:
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens([AddedToken("<|x|>", special=True)], special_tokens=True)
    special = tokenizer.convert_tokens_to_ids("<|x|>")
    text = AnswerText(tokenizer, SamplingParams(**fields))
    pieces = [text.push(token) for token in (special, special, 0, special, 1)]
    assert "".join([*pieces, text.finish()]) == text.text == expected


def test_spaces_between_special_tokens() -> None:
    """A decoder that puts a space before every word puts none between special tokens then."""
    backend = Tokenizer(models.WordLevel({"a": 0, "<x>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
    told = []
    for spaces in (True, False):
        params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces)
        text = AnswerText(tokenizer, params)
        pieces = [*(text.push(token) for token in (0, 1, 1, 0, 1)), text.finish()]
        told.append("".join(pieces))
    assert told == ["a <x> <x> a <x>", "a <x><x> a <x>"]


def answer(
    tokens: str, *, ends: EndTokens = ENDS, max_tokens: int = 16, **fields: Any
) -> tuple[Answer, list[str]]:
    """Give an answer characters as its tokens; "." is the end token."""
    tokenizer: Any = ByteTokenizer()
    row = SamplingRow(params=SamplingParams(**fields), prompt_token_ids=[65])
    made = Answer(row, tokenizer, max_tokens=max_tokens, ends=ends)
    told = []
    for each in tokens:
        assert made.finish_reason is None
        told.append(made.take(Choice(END if each == "." else ord(each), None)))
    assert "".join(told) == made.text
    return made, told


def test_an_answer_ends_for_one_reason() -> None:
    for tokens, fields, text, reason, why in (
        ("ab.", {}, "ab", "stop", None),
        ("cdef", {"max_tokens": 4}, "cdef", "length", None),
        ("g!", {"stop": "!"}, "g", "stop", "!"),
        ("g!", {"stop": "!", "include_stop_str_in_output": True}, "g!", "stop", "!"),
        ("abc", {"stop_token_ids": [99]}, "ab", "stop", 99),
        ("abc", {"stop_token_ids": [99], "include_stop_str_in_output": True}, "abc", "stop", 99),
        ("ab", {"ignore_eos": True, "stop_token_ids": [98]}, "a", "stop", 98),
        ("a.b", {"ignore_eos": True, "max_tokens": 3}, "a\x00b", "length", None),
        ("..c.", {"min_tokens": 3}, "\x00\x00c", "stop", None),
        ("!!!", {"min_tokens": 2, "stop": "!"}, "!!", "stop", "!"),
        ("ab", {"max_tokens": 2, "stop_token_ids": [98]}, "a", "stop", 98),
    ):
        given: Any = fields
        made, _ = answer(tokens, **{"max_tokens": 16, **given})
        assert (made.text, made.finish_reason, made.stop_reason) == (text, reason, why), tokens
        assert len(made.token_ids) == len(tokens)


def test_further_end_tokens_of_a_model_are_a_reason() -> None:
    ends = EndTokens(primary=END, others=frozenset([98]))
    made, _ = answer("ab", ends=ends)
    assert (made.finish_reason, made.stop_reason) == ("stop", 98)
    made, _ = answer("abc", ends=ends, ignore_eos=True)
    assert made.finish_reason is None
    assert made.row.end_token_ids == {END, 98}


def test_an_answer_that_is_ended_releases_what_it_held() -> None:
    made, told = answer("so EN", stop="END")
    assert told == ["s", "o", " ", "", ""]
    assert made.end("abort") == "EN"
    assert (made.text, made.finish_reason) == ("so EN", "abort")
    assert made.end() == ""


def test_news_are_what_the_last_token_added() -> None:
    made, told = answer("ab!", stop="!?", max_tokens=3)
    assert told == ["a", "b", "!"]
    news = made.news(2, told[-1])
    assert (news.index, news.text, news.token_ids) == (2, "!", [33])
    whole = made.output(0)
    assert (whole.text, whole.token_ids, whole.finished()) == ("ab!", [97, 98, 33], True)
    assert whole.cumulative_logprob is None
    assert whole.logprobs is None
