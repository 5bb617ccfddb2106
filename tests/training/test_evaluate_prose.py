"""Evaluation of prose models: windows, losses by position and context, samples made ahead."""

import json
import lzma
import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoTokenizer

from penstock.core.errors import ConfigError
from penstock.evaluate.result import Result
from penstock.evaluate.tasks import judge
from penstock.evaluate.tasks.english.filler import prose
from penstock.models.loader import load
from training import evaluate, evaluate_prose, model_card, perplexity, train
from training.asked import Job
from training.asked_prose import (
    PieceTokenizer,
    PlainTokenizer,
    answer_in_order,
    english_asker,
    read_holdout,
)
from training.card_prose import origin
from training.evaluation import Cell, CellRun

CONFIGS = Path(train.__file__).parent / "configs"
SHORT = {"micro_batch_tokens = 1024": "micro_batch_tokens = 512", "steps = 6": "steps = 2"}


SENTENCES = {6: 200, 7: 20}
"""Of documents that are held out; the others have 250."""


def text_of(seed: int, sentences: int) -> str:
    taken = prose(random.Random(seed)).take(sentences)
    parts = [" ".join(taken[at : at + 6]) for at in range(0, sentences, 6)]
    return "\n\n".join(parts)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the real corpus has, of made-up prose."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, seeds in {"books": (1, 2, 3), "docs": (4, 5), "holdout": (6, 7)}.items():
        with lzma.open(folder / f"{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            for seed in seeds:
                record = {
                    "id": f"{name}-{seed}", "source": f"example.org/{name}@0123abcd:some/{seed}.md",
                    "licence": "CC0-1.0", "text": text_of(seed, SENTENCES.get(seed, 250)),
                }  # fmt: skip
                if name == "books":
                    record |= {"title": f"Book {seed}", "author": "Nobody"}
                file.write(json.dumps(record) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy run on it."""
    folder = tmp_path_factory.mktemp("runs")
    text = (CONFIGS / "prose-toy.toml").read_text()
    for old, new in SHORT.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "toy.toml").write_text(text)
    words = [str(folder / "toy.toml"), "--corpus", str(corpus), "--out", str(folder / "toy")]
    assert train.main([*words, "--workers", "0"]) == 0
    return folder / "toy"


def test_windows_are_whole_and_of_one_document() -> None:
    counts = np.arange(100, dtype=np.int32)
    windows = perplexity.windows_of(
        ["a" * 25, "b" * 9, "c" * 7], lambda text: [ord(text[0]) - 90] * len(text), 10, counts
    )
    assert windows.ids.shape == (3, 10)
    assert windows.documents == 2
    assert (windows.ids[:, 0] == 1).all()
    assert windows.ids[:, 1:].tolist() == [[7] * 9, [7] * 9, [8] * 9]
    assert windows.byte_counts is not None
    assert windows.byte_counts.tolist() == windows.ids.tolist()


def test_losses_are_those_of_the_model(run: Path) -> None:
    model: Any = load(run / "model", dtype="float32").model
    ids = torch.randint(3, 512, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    wanted = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(),
                                      reduction="none").view(3, 39)  # fmt: skip
    found = perplexity.losses(model, ids.int().numpy(), 39)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-5)
    some = perplexity.losses(model, ids.int().numpy(), 7)
    np.testing.assert_allclose(some, wanted[:, -7:].numpy(), rtol=1e-4, atol=1e-5)


class Copying:
    """Stands for a model: knows a token as soon as it has come once, and nothing else."""

    def __init__(self) -> None:
        self.base_model = self

    def get_input_embeddings(self) -> Any:
        return torch.nn.Embedding(64, 64)

    def get_output_embeddings(self) -> Any:
        return lambda hidden: hidden

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        seen = functional.one_hot(input_ids.long(), 64).cumsum(1).clamp_max(1)

        class Out:
            last_hidden_state = 50.0 * seen

        return Out


def test_measures_by_position_and_context() -> None:
    """A window of 1 to 32 twice, then 33 to 62 twice: the second time each token is foreseen."""
    first, second = list(range(2, 34)), list(range(34, 64))
    ids = [1, *first, *first, *second, *second, 2, 3, 4]
    windows = perplexity.Windows(np.array([ids, ids], dtype=np.int32), None, 1)
    figures = perplexity.measure(Copying(), windows)
    whole, again = figures["buckets"]
    assert whole == again
    assert whole["tokens"] == 2 * (len(ids) - 1)
    foreseen = perplexity.losses(Copying(), windows.ids, len(ids) - 1)[0]
    assert whole["nats"] == pytest.approx(foreseen.mean())
    assert foreseen[32:64].max() < foreseen[:32].min()
    assert whole["error"] == 0.0
    assert whole["bits_per_byte"] is None
    assert figures["contexts"][-1]["worse"] == 0.0
    assert "nats a token" in perplexity.tables(figures)[0]


def test_less_context_is_worse_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "TAIL", 16)
    monkeypatch.setattr(perplexity, "CONTEXTS", (8, 32))
    monkeypatch.setattr(perplexity, "EDGES", (0, 16, 32))
    tail = list(range(10, 26))
    row = [1, *tail, *[5] * 10, *[6] * 20, *tail]  # what the tail repeats is 31 tokens before it
    other = [1, *tail, *[7] * 10, *[6] * 20, *tail]
    windows = perplexity.Windows(
        np.array([row, other], dtype=np.int32), np.full((2, 63), 2, dtype=np.int32), 2
    )
    read: list[int] = []
    figures = perplexity.measure(Copying(), windows, read.append)
    assert sum(read) == perplexity.tokens_to_read(windows)
    short, longer, full = figures["contexts"]
    assert (short["tokens"], longer["tokens"], full["tokens"]) == (8, 32, 47)
    assert short["worse"] > longer["worse"] > 1.0
    assert full["worse"] == 0.0
    assert short["worse"] == pytest.approx(short["nats"] - full["nats"])
    edges = [(each["from"], each["to"]) for each in figures["buckets"]]
    assert edges == [(0, 16), (16, 32), (32, 63), (0, 63)]
    tokens = [each["tokens"] for each in figures["buckets"]]
    assert tokens == [30, 32, 62, 124]
    for each in figures["buckets"]:
        assert each["bits_per_byte"] == pytest.approx(each["nats"] / np.log(2) / 2)


def test_bytes_of_tokens(run: Path) -> None:
    tokenizer = PlainTokenizer(run / "model")
    vocabulary = load(run / "model").tokenizer.get_vocab()  # type: ignore[union-attr]
    counts = perplexity.byte_lengths(vocabulary)
    assert counts is not None
    text = text_of(9, 30) + " naïve -- “so” 1,234"
    assert counts[list(tokenizer.encode_text(text))].sum() == len(text.encode())
    assert perplexity.byte_lengths({"blue": 0, "sky": 1}) is None


def test_special_tokens_in_a_text_are_text(run: Path) -> None:
    tokenizer = PlainTokenizer(run / "model")
    assert 2 not in tokenizer.encode_text("a <eos> b")
    assert 2 in tokenizer.encode("a <eos> b")
    theirs = AutoTokenizer.from_pretrained(run / "model")
    assert list(tokenizer.encode(text_of(3, 10))) == theirs.encode(text_of(3, 10))


def test_pieces_have_the_tokens_of_the_whole(run: Path, corpus: Path) -> None:
    plain = PlainTokenizer(run / "model")
    quick = PieceTokenizer(run / "model", read_holdout(corpus)[0])
    assert quick._cuts
    odd = 'A. B,\n\n c;  d: e.\n 1. 2,3 \n\n\nMr. <eos> x.\t"No." naïve\u00a0y. z '
    for text in (odd, text_of(11, 60) + odd, "", " ", "\n"):
        for _ in range(2):
            assert list(quick.encode(text)) == list(plain.encode(text))
    text = " It is."
    assert list(quick.encode(text, add_special_tokens=False)) == list(plain.encode(text))[1:]


def test_a_tokenizer_that_goes_on_over_white_space_is_not_cut(run: Path) -> None:
    content = json.loads((run / "model" / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": False,
                                "trim_offsets": True}  # fmt: skip
    other = run / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text(json.dumps(content))
    probe = text_of(12, 40)
    assert not PieceTokenizer(other, probe)._cuts
    assert PieceTokenizer(other, probe).encode(probe) == PlainTokenizer(other).encode(probe)


def test_asked_samples_are_in_held_out_prose(run: Path, corpus: Path) -> None:
    ask = english_asker(run / "model", corpus, 0, 1)
    asked, again = (ask(Job(0, "single_2", 700, 0)) for _ in range(2))
    assert np.array_equal(asked.ids, again.ids)
    assert asked.sample is not None
    assert ask(Job(0, "single_2", 700, 1)).sample is None
    theirs = AutoTokenizer.from_pretrained(run / "model")
    said = theirs.decode(asked.ids[-asked.answer_tokens : -1])
    assert said == asked.sample.answer
    assert asked.ids[0] == 1
    assert asked.ids[-1] == 2
    assert len(asked.ids) - asked.answer_tokens <= 700
    held_out = " ".join(read_holdout(corpus)[0].split())
    pieces = [piece.strip() for piece in asked.sample.prompt.split(".")]
    assert sum(piece in held_out for piece in pieces if len(piece) > 20) > 5
    assert "too short" in ask(Job(0, "single_2", 20, 0)).refused


def test_values_are_asked_in_the_order_of_the_document(run: Path, corpus: Path) -> None:
    ask = english_asker(run / "model", corpus, 0, 9)
    seen = set()
    for number in range(4):
        sample = ask(Job(0, "multi_value", 900, number)).sample
        assert sample is not None
        told = answer_in_order(sample)
        places = [sample.prompt.index(value) for value in told.strip(" .").split(", ")]
        assert places == sorted(places)
        assert judge(sample, told) == 1.0
        seen.add(told == sample.answer)
    assert False in seen
    one = ask(Job(0, "multi_query", 900, 0)).sample
    assert one is not None
    assert answer_in_order(one) == one.answer


def test_answers_without_an_order_are_only_decoded(run: Path, corpus: Path) -> None:
    loaded = load(run / "model", dtype="float32")
    cells = CellRun(loaded, [Cell(task="common_words", tokens=1500)], samples=2, generate_most=600)
    given = (run / "model", corpus, 0, 1)
    cells.run(english_asker, given, workers=0, keep=lambda: None)
    (cell,) = cells.cells
    assert (cell.asked, cell.generated) == (0, 1)
    assert "-" in evaluate.report([cell.figures()])


def test_evaluation_and_card(
    run: Path, corpus: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = run / "evaluation.json"
    words = [str(run / "model"), "--corpus", str(corpus), "--window", "1024", "--tokens",
             "100,1024", "--tasks", "single_2,state_tracking", "--samples", "3", "--generate", "1",
             "--generate-most", "60", "--dtype", "float32", "--out", str(out)]  # fmt: skip
    assert evaluate_prose.main([*words, "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "512 to 1,024" in printed
    assert "greedy decoding" in printed
    figures = Result.load(out).figures
    assert evaluate_prose.main([*words, "--workers", "0"]) == 0
    assert Result.load(out).figures == figures
    cells = {(c["task"], c["tokens"]): c for c in figures["cells"]}
    assert cells["single_2", 1024]["asked"] == 3
    assert "too short" in cells["state_tracking", 100]["refused"]
    windows = figures["perplexity"]["windows"]
    assert windows == figures["perplexity"]["buckets"][0]["tokens"] // 511
    assert figures["perplexity"]["documents"] == 1
    assert model_card.main([str(run), "--corpus", str(corpus)]) == 0
    card = (run / "model" / "README.md").read_text()
    for said in ("example.org/books@0123abcd", "CC0-1.0", "## Perplexity", "512 to 1,024",
                 "single_2", "byte-level BPE of 512", "4 of 4 steps", "held back"):  # fmt: skip
        assert said in card, said
    assert "some/" not in card
    assert model_card.main([str(run), "--statistics", str(out)]) == 2
    assert "no result of research.statistics" in capsys.readouterr().err


def test_sources_without_their_paths() -> None:
    assert origin("example.org/a/b@0123:c/d.md") == "example.org/a/b@0123"
    assert origin("Collection #12 via example.org/a/b@0123") == "example.org/a/b@0123"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--tasks", "nothing"], "no task is called"),
        (["--window", "90000"], "--window 90000"),
        (["--window", "4000"], "give a smaller --window"),
        (["--corpus", "/no/such/folder"], "cannot read documents"),
    ],
)
def test_what_cannot_be_measured(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], said: str
) -> None:
    with lzma.open(tmp_path / "holdout.jsonl.xz", "wt", encoding="utf-8") as file:
        record = {"id": "a", "source": "b", "licence": "c", "text": text_of(1, 12)}
        file.write(json.dumps(record) + "\n")
    words = [str(run / "model"), "--corpus", str(tmp_path), "--workers", "0", *change]
    assert evaluate_prose.main(words) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        PlainTokenizer(tmp_path)


def test_byte_alphabet() -> None:
    assert len(perplexity.byte_alphabet()) == 256
    assert list(islice(sorted(perplexity.byte_alphabet()), 2)) == ["!", '"']
