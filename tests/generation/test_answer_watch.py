"""AnswerWatch: the pieces it streams are the answer, and each row ends where it should."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from penstock.generation.answer_watch import AnswerText, AnswerWatch
from penstock.generation.sampling import SamplingParams
from penstock.models.loader import load
from penstock.search.step_texts import StepTexts

END = 0


class ByteTokenizer:
    """Token ids are bytes, so that one character can take several tokens."""

    def decode(
        self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return bytes(ids).decode("utf-8", errors="replace")


def push_all(text: AnswerText, content: str) -> tuple[list[str], bool]:
    pieces = []
    for byte in content.encode():
        piece, stopped = text.push(byte)
        pieces.append(piece)
        if stopped:
            return pieces, True
    return [*pieces, text.finish()], False


def byte_text(*stop: str) -> AnswerText:
    tokenizer: Any = ByteTokenizer()
    return AnswerText(tokenizer, stop)


@pytest.mark.parametrize("content", ["plain", "naïve café", "日本語 text", "🙂🙃 a 🙂"])
def test_pieces_join_to_the_text_and_never_hold_half_a_character(content: str) -> None:
    text = byte_text()
    pieces, _ = push_all(text, content)
    assert "".join(pieces) == content == text.text
    assert "\ufffd" not in "".join(pieces)


def test_a_stop_string_ends_the_text_before_it() -> None:
    text = byte_text("END", "\n\n")
    pieces, stopped = push_all(text, "so EN far\nso ENDgood")
    assert stopped
    assert "".join(pieces) == "so EN far\nso " == text.text


def test_what_could_begin_a_stop_string_is_held_back_only_as_long_as_it_could() -> None:
    text = byte_text("END")
    shown = [text.push(byte)[0] for byte in b"aENxE"]
    assert shown == ["a", "", "", "ENx", ""]
    assert text.finish() == "E"


def test_a_special_token_takes_no_space_away() -> None:
    tokenizer = load("recall").tokenizer
    assert tokenizer is not None
    words = tokenizer("The grass is green .", add_special_tokens=False)["input_ids"]
    special = tokenizer.unk_token_id
    ids = [special, words[0], special, special, *words[1:], special]
    text = AnswerText(tokenizer, ("is green",))
    pieces = [text.push(token)[0] for token in ids[:5]]
    assert pieces == ["", "The", "", "", " grass"]
    assert [text.push(token) for token in ids[5:7]] == [(" ", False), ("", True)]
    whole = AnswerText(tokenizer, ())
    assert "".join([*(whole.push(token)[0] for token in ids), whole.finish()]) == whole.text
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
    text = AnswerText(tokenizer, ())
    pieces = [text.push(token)[0] for token in (0, 1, 2, 3)]
    assert pieces == ["print", " '", "sum", "'"]
    assert StepTexts(tokenizer).decode([0, 1, 2, 3]) == "print 'sum'"


def test_a_token_that_ends_in_half_a_character() -> None:
    """What is in front of the half is told, and may complete a stop string."""
    backend = Tokenizer(models.BPE({"so": 0, "EN": 1, "Dâ": 2, "Ĥ¬": 3}, []))  # D, half a €
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    text = AnswerText(tokenizer, ())
    assert [text.push(token)[0] for token in (0, 1, 2, 3, 0)] == ["so", "EN", "D", "€", "so"]
    watched = AnswerWatch(
        tokenizer, SamplingParams(max_tokens=3, stop="END"), num_rows=1, end_token_ids=frozenset()
    )
    ended = [watched(torch.tensor([[token]]), None).tolist() for token in (0, 1, 2)]
    assert ended == [[False], [False], [True]]
    assert (watched.text(0), watched.finish_reasons) == ("so", ["stop"])


def watch(num_rows: int, said: list[tuple[int, str]], **fields: Any) -> AnswerWatch:
    tokenizer: Any = ByteTokenizer()
    return AnswerWatch(
        tokenizer,
        SamplingParams(**fields),
        num_rows=num_rows,
        end_token_ids=frozenset([END]),
        on_text=lambda row, piece: said.append((row, piece)),
    )


def feed(watched: AnswerWatch, *rows: str) -> list[list[bool]]:
    """Give the rows' characters one step at a time; "." ends a row."""
    columns = [[END if c == "." else ord(c) for c in column] for column in zip(*rows, strict=True)]
    return [watched(torch.tensor(column)[:, None], None).tolist() for column in columns]


def test_rows_end_on_their_own() -> None:
    said: list[tuple[int, str]] = []
    watched = watch(3, said, max_tokens=4, stop="!")
    done = feed(watched, "ab.z", "cdef", "g!zz")
    assert done == [
        [False, False, False],
        [False, False, True],
        [True, False, True],
        [True, True, True],
    ]
    assert watched.finish_reasons == ["stop", "length", "stop"]
    assert [watched.text(row) for row in range(3)] == ["ab", "cdef", "g"]
    assert watched.token_ids == [[97, 98, END], [99, 100, 101, 102], [103, 33]]
    for row in range(3):
        assert "".join(piece for r, piece in said if r == row) == watched.text(row)


def test_times_are_those_of_the_first_and_last_token() -> None:
    watched = watch(1, [], max_tokens=9)
    feed(watched, "a")
    first = watched.first_token_s
    feed(watched, "b")
    assert watched.first_token_s == first < watched.last_token_s


def test_without_a_tokenizer_there_are_tokens_but_no_text() -> None:
    watched = AnswerWatch(None, SamplingParams(max_tokens=2), num_rows=1, end_token_ids=frozenset())
    assert feed(watched, "ab") == [[False], [True]]
    assert watched.token_ids == [[97, 98]]
    assert watched.text(0) == ""
