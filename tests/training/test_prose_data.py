"""Prose rows: the corpus in tokens, splicing, weights, and the bench's own wording."""

import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import training
from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.filler import joined, prose
from penstock.evaluate.tasks.english.haystack import TextHaystack, split_sentences
from penstock.evaluate.tasks.english.prompt_fit import Prompter
from penstock.evaluate.tasks.english.registry import make_english_sample
from training.corpus import Corpus, prepare, read_documents
from training.data import BOS, EOS, OTHER
from training.prose_data import (
    ANSWER,
    BETWEEN,
    DOCUMENT,
    PADDING,
    PLAIN,
    ProseRow,
    ProseRowMaker,
    RowTokenizer,
    weigh,
)
from training.prose_settings import ProseSettings
from training.prose_tasks import KNOWN, draw_task
from training.run_settings import read_run_settings
from training.workers import BatchStream

CONFIGS = Path(training.__file__).parent / "configs"


def toy() -> ProseSettings:
    settings = read_run_settings(CONFIGS / "prose-toy.toml")
    assert isinstance(settings, ProseSettings)
    return settings


@pytest.fixture(scope="module")
def corpus(prose_corpus: Path) -> Corpus:
    return Corpus.open(prose_corpus)


@pytest.fixture(scope="module")
def maker(corpus: Corpus) -> ProseRowMaker:
    return ProseRowMaker(replace(toy(), mix=dict.fromkeys(KNOWN, 1 / len(KNOWN))), corpus.folder)


def text_of(corpus: Corpus, tokens: np.ndarray) -> str:
    text: str = corpus.tokenizer().decode(tokens.tolist(), skip_special_tokens=False)
    return text


def encoded(corpus: Corpus, text: str) -> list[int]:
    """The tokens of a text, its special tokens taken as such."""
    ids: list[int] = corpus.tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def own_part(row: ProseRow) -> np.ndarray:
    """A row's tokens without the plain prose that fills it up."""
    kept: np.ndarray = row.tokens[row.kinds != PLAIN]
    return kept


def test_sentences_join_to_the_text(prose_texts: list[str]) -> None:
    text = prose_texts[0]
    pieces = split_sentences(text)
    assert joined(pieces, " ") == text
    assert "\n\n1. Mr. T. Brown came in 1851." in pieces
    assert '"Is it?"' in pieces
    assert "\nof two lines." in pieces
    assert not any(piece.startswith(" ") or piece.endswith((" ", "\n")) for piece in pieces)


def test_corpus_holds_every_document_whole_and_in_order(
    corpus: Corpus, prose_texts: list[str]
) -> None:
    assert len(corpus.documents) - 1 == 9
    tokenizer = corpus.tokenizer()
    tokenizer.encode_special_tokens = True
    for number, text in enumerate(prose_texts):
        assert corpus.text(tokenizer, number) == text
        start, end = corpus.documents[number : number + 2]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert corpus.tokens[start:end].tolist() == ids
    assert set(corpus.documents) <= set(corpus.pieces)
    assert EOS not in corpus.tokens, "what looks like a special token in a text is text"


def test_preparing_again_gives_the_same_or_uses_what_is_there(
    corpus: Corpus, prose_source: Path, tmp_path: Path
) -> None:
    source, plan = tmp_path / "source", toy().corpus
    shutil.copytree(prose_source, source)
    again = prepare(source, tmp_path / "again", plan, 4096, lambda line: None)
    for name in ("tokenizer.json", "tokens.npy", "documents.npy", "pieces.npy"):
        there = (corpus.folder / name).read_bytes()
        assert (again.folder / name).read_bytes() == there, name
    said: list[str] = []
    prepare(source, tmp_path / "again", plan, 4096, said.append)
    assert not said
    (source / "docs.jsonl.xz").write_bytes((source / "books.jsonl.xz").read_bytes())
    with pytest.raises(ConfigError, match="was made of another corpus"):
        prepare(source, tmp_path / "again", plan, 4096, said.append, again=True)
    assert (again.folder / "tokens.npy").read_bytes() == (corpus.folder / "tokens.npy").read_bytes()
    (source / "docs.jsonl.xz").unlink()
    with pytest.raises(ConfigError, match=r"lacks docs\.jsonl\.xz"):
        prepare(source, tmp_path / "again", plan, 4096, said.append)
    with pytest.raises(ConfigError, match="cannot read documents"):
        list(read_documents(source / "holdout.jsonl.xz"))


def test_digits_are_tokens_of_their_own(corpus: Corpus) -> None:
    ids = encoded(corpus, "is 1851.")
    assert [text_of(corpus, np.array([one])) for one in ids][-5:] == ["1", "8", "5", "1", "."]
    assert corpus.tokenizer().encode("is").ids[0] == BOS


@pytest.mark.parametrize("task", KNOWN)
def test_spliced_rows_are_the_tokens_of_their_text(
    maker: ProseRowMaker, corpus: Corpus, task: str
) -> None:
    maker._tasks, maker._shares = [task], [1.0]
    for seed in range(3):
        row = maker.asking_row(3000, f"x/{seed}")
        ids = own_part(row)
        assert ids[0] == BOS
        assert ids[-1] == EOS
        turns = text_of(corpus, ids).removeprefix("<bos>").split("<eos>")
        again = [[*encoded(corpus, turn), EOS] for turn in turns[:-1]]
        assert [token for turn in again for token in turn] == ids[1:].tolist()
        assert not (row.kinds == PADDING).any()
        assert ((row.kinds == ANSWER) >= (row.tokens == EOS))[: len(ids)].all()


def test_a_row_is_a_sample_of_the_bench(corpus: Corpus) -> None:
    """The same seed gives the same draft; the document is real text; nothing else differs."""
    plan = replace(toy().rows, other_wordings=0.0, further_share=0.0)
    settings = replace(toy(), rows=plan, mix={"single_2": 1.0})
    row = ProseRowMaker(settings, corpus.folder).asking_row(600, "y")
    whole = text_of(corpus, own_part(row)).removeprefix("<bos>").removesuffix("<eos>")
    prompt, answer = whole[: whole.rindex(" is") + 3], whole[whole.rindex(" is") + 3 :]
    (fact,) = re.findall(r"One vault number of (\S+) is (\d{7})\.", prompt)
    assert answer == f" {fact[1]}."
    haystack = TextHaystack([corpus.text(corpus.tokenizer(), 0)])
    tokenizer = RowTokenizer(corpus.tokenizer())
    sample = make_english_sample("single_2", 600, random.Random(0), tokenizer, haystack=haystack)
    (other,) = re.findall(r"One vault number of (\S+) is", sample.prompt)
    for start, end in ((None, "\n\n"), ("\n\nQuestion", None)):
        ours = prompt[prompt.rindex(start) if start else 0 : prompt.index(end) if end else None]
        theirs = sample.prompt[
            sample.prompt.rindex(start) if start else 0 : sample.prompt.index(end) if end else None
        ]
        assert ours.replace(fact[0], other) == theirs
    body = prompt[prompt.index("\n\n") + 2 : prompt.rindex("\n\nQuestion")]
    told = f"One vault number of {fact[0]} is {fact[1]}."
    text = body.replace(f" {told}", "").removeprefix(told).lstrip("\n")
    texts = [corpus.text(corpus.tokenizer(), number) for number in range(8)]
    assert any(text[:300] in one for one in texts)


def test_further_answers_follow_from_the_document(maker: ProseRowMaker, corpus: Corpus) -> None:
    maker._tasks, maker._shares = ["many_keys"], [1.0]
    asked = 0
    for seed in range(6):
        row = maker.asking_row(1000, f"z/{seed}")
        whole = text_of(corpus, own_part(row))
        first, *turns = whole.removesuffix("<eos>").split("<eos>")
        for turn in turns:
            value = re.findall(r" (\d{7})\.$", turn)[0]
            key = re.findall(r"[a-z]+-[a-z]+", turn)[0]
            assert re.search(rf"{key}\D*{value}|{value}\D*{key}", first)
            asked += 1
    assert asked > 6
    maker._tasks = ["quote"]
    row = maker.asking_row(1000, "q")
    for answer in text_of(corpus, own_part(row)).split("Answer:")[1:]:
        said = answer.split("<eos>")[0].strip()
        assert said in text_of(corpus, row.tokens).split("Question:")[0]


def test_several_values_are_said_in_the_documents_order(
    maker: ProseRowMaker, corpus: Corpus
) -> None:
    maker._tasks, maker._shares = ["multi_value"], [1.0]
    for seed in range(4):
        whole = text_of(corpus, own_part(maker.asking_row(800, f"v/{seed}")))
        document, question = re.split(r"\n\n(?:Question|What|Q:)", whole)
        assert re.findall(r"\d{7}", document) == re.findall(r"\d{7}", question)


def test_plain_rows_are_chunks_of_a_document_or_short_ones_in_turn(corpus: Corpus) -> None:
    maker = ProseRowMaker(toy(), corpus.folder)
    texts = [corpus.text(corpus.tokenizer(), number) for number in range(8)]
    packed = 0
    for seed in range(30):
        row = maker.plain_row(700, f"p/{seed}")
        assert (row.positions == np.arange(700)).all()
        assert row.tokens[0] == BOS
        parts = text_of(corpus, row.tokens[1:]).split("<eos>")
        packed += len(parts) > 1
        for part in parts:
            if "naïve" not in part and "\ufffd" not in part:
                assert any(part in text for text in texts)
    assert packed
    assert packed < 30


def test_what_is_held_back_is_in_no_row(corpus: Corpus) -> None:
    maker = ProseRowMaker(toy(), corpus.folder)
    for number in range(24):
        text = text_of(corpus, maker.batch(number).tokens.reshape(-1))
        assert "held back" not in text


def test_batches_are_reproducible_and_differ(corpus: Corpus) -> None:
    settings = toy()
    one, two = (ProseRowMaker(settings, corpus.folder) for _ in range(2))
    for number in (13, 2, 13):
        first, again = one.batch(number), two.batch(number)
        for name in ("tokens", "positions", "places", "targets", "weights", "groups"):
            assert np.array_equal(getattr(first, name), getattr(again, name)), name
    assert not np.array_equal(one.batch(2).tokens, one.batch(3).tokens)
    other = ProseRowMaker(replace(settings, seed=9), corpus.folder)
    assert not np.array_equal(one.batch(2).tokens, other.batch(2).tokens)
    with BatchStream(settings, corpus.folder, first=2, last=4, workers=2) as stream:
        there = [batch.tokens for batch in stream]
    assert np.array_equal(there[0], one.batch(2).tokens)
    assert np.array_equal(there[1], one.batch(3).tokens)


def test_batch_guesses_the_token_behind_its_place(corpus: Corpus) -> None:
    maker = ProseRowMaker(toy(), corpus.folder)
    for number in (0, 20):
        batch = maker.batch(number)
        rows, length = batch.tokens.shape
        flat = batch.tokens.reshape(-1)
        assert batch.tokens.dtype == batch.targets.dtype == np.uint16
        assert batch.positions.dtype == batch.places.dtype == np.int32
        assert len(batch.places) == rows * length == 1024
        weighed = batch.weights > 0
        assert ((batch.places[weighed] + 1) % length != 0).all(), "no row guesses the next one"
        assert np.array_equal(flat[batch.places[weighed] + 1], batch.targets[weighed])
        assert batch.targets.max() < 512
        assert set(batch.groups) <= {OTHER, *range(len(toy().groups))}
        assert (batch.groups[~weighed] == OTHER).all()


def test_answers_have_their_share_of_the_weight() -> None:
    settings = toy()
    kinds = np.full((4, 400), DOCUMENT, np.uint8)
    kinds[0] = PLAIN
    kinds[1, :300], kinds[1, 300:310] = BETWEEN, ANSWER
    kinds[2, 390:], kinds[3, 300:] = ANSWER, ANSWER
    weights = weigh(kinds, settings)
    answers = weights[kinds == ANSWER].sum()
    assert answers / weights.sum() == pytest.approx(0.33)
    sums = [weights[row][kinds[row] == ANSWER].sum() for row in (1, 2, 3)]
    assert sums == pytest.approx([answers / 3] * 3)
    assert set(weights[1, :300]) == {0.1}
    capped = weigh(kinds, replace(settings, rows=replace(settings.rows, answer_most=4.0)))
    assert [capped[row][kinds[row] == ANSWER].sum() for row in (1, 2)] == pytest.approx([40, 40])
    assert capped[kinds == ANSWER].sum() < answers


def test_unknown_tasks_and_bad_settings_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="riddle"):
        ProseRowMaker(replace(toy(), mix={"riddle": 1.0}), corpus.folder)
    short = tuple(replace(stage, lengths=(64,)) for stage in toy().stages)
    with pytest.raises(ConfigError, match="rows of 64 tokens are too short"):
        ProseRowMaker(replace(toy(), stages=short), corpus.folder)
    plan = replace(toy().corpus, held_back=9)
    with pytest.raises(ConfigError, match="leaves no document"):
        ProseRowMaker(replace(toy(), corpus=plan), corpus.folder)
    text = (CONFIGS / "prose-toy.toml").read_text()
    for old, new, message in (
        ("recall = 0.7\n", "", "stages lacks the setting 'recall'"),
        ("recall = 0.7", "recall = 1.7", "recall must be 0 to 1"),
        ("vocabulary = 512", "vocabulary = 100000", "300 to 65536"),
        ("answer_share = 0.33", "answer_share = 1", "below 1"),
        ("answer_most", "answer_cap", "no setting 'answer_cap'"),
    ):
        (tmp_path / "bad.toml").write_text(text.replace(old, new, 1))
        with pytest.raises(ConfigError, match=message):
            read_run_settings(tmp_path / "bad.toml")


@pytest.mark.parametrize("name", ["prose-1", "prose-toy"])
def test_settings_are_whole(name: str) -> None:
    settings = read_run_settings(CONFIGS / f"{name}.toml")
    assert isinstance(settings, ProseSettings)
    assert settings.name == name
    assert set(settings.mix) <= set(KNOWN)
    assert settings.rate_at(0) < settings.rate_at(settings.optimizer.warmup_steps)
    assert settings.rate_at(settings.steps - 1) < 0.3
    for stage in settings.stages:
        assert all(settings.micro_batch_tokens % length == 0 for length in stage.lengths)
    longest = max(settings.stages[-1].lengths)
    assert longest <= settings.model.positions


def test_too_short_for_a_long_answer(corpus: Corpus) -> None:
    prompter = Prompter(RowTokenizer(corpus.tokenizer()))
    with pytest.raises(ConfigError, match="too short for pointer_chasing"):
        draw_task("pointer_chasing", 512, random.Random(0), prompter, prose, 0.0, str)
