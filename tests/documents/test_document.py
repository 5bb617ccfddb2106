"""A stored document answers as the cache that it was made of, and says when it cannot."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from penstock import ConfigError, KVSwap, PromptError, SamplingParams, TieredCache
from penstock.core.errors import DocumentDamagedError, DocumentError, DocumentMismatchError
from penstock.documents.document import Document
from penstock.documents.settings import DocumentSettings
from penstock.methods import Quest
from penstock.methods.baselines.h2o import H2O
from penstock.models.cache_argument import cache_argument
from penstock.models.calibrate import calibrate
from penstock.models.loader import load
from penstock.storage import direct_file, file_space, threaded_file
from penstock.testing.tiny_models import VOCABULARY, tiny_model

POLICY = KVSwap(group_tokens=8, window_tokens=16, selected_tokens=48)
NEW_TOKENS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
SETTINGS = DocumentSettings(store="memory", prefill_chunk_size=64)


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


TEXT = ids(203)
QUESTIONS = [ids(9, seed=seed) for seed in range(1, 4)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def adapted(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> DocumentSettings:
    """Settings with a basis that does not depend on the text."""
    path = tmp_path_factory.mktemp("adapter") / "adapter.safetensors"
    calibrate(model, [torch.tensor(ids(300, seed=77))]).save(path)
    return replace(SETTINGS, adapter=path)


def create(model: PreTrainedModel, path: Path, **kwargs: Any) -> Document:
    wanted = {"policy": POLICY, "memory": None, "settings": SETTINGS, "text": TEXT, **kwargs}
    return Document.create(model, path=path, **wanted)


def answers(document: Document, questions: Any = QUESTIONS[:2], **kwargs: Any) -> list[list[int]]:
    return [output.token_ids for output in document.ask(questions, GREEDY, **kwargs)]


def fresh(model: Any, document: Document, question: list[int], text: list[int] = TEXT) -> list[int]:
    """What a new cache of the same policy says, text and question prefilled."""
    tokens = torch.tensor([[*text, *question]])
    most = len(text) + len(question) + NEW_TOKENS
    with TieredCache(
        model, document.policy, None, "memory", max_tokens=most, must_tier=True,
        prompt_tokens=len(text),
    ) as cache:  # fmt: skip
        with torch.no_grad():
            for start in range(0, len(text), 64):
                part = tokens[:, start : min(start + 64, len(text))]
                model(part, **cache_argument(model, cache), use_cache=True)
        out = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens),
            **cache_argument(model, cache), max_new_tokens=GREEDY.max_tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    new: list[int] = out[0, tokens.shape[1] :].tolist()
    return new


@pytest.fixture(scope="module")
def stored(
    model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A document that nobody changes, and what it answers."""
    path = tmp_path_factory.mktemp("stored") / "d"
    with create(model, path) as document:
        return path, answers(document)


@pytest.fixture
def copied(stored: tuple[Path, list[list[int]]], tmp_path: Path) -> tuple[Path, list[list[int]]]:
    """The same in a place of its own, to be spoilt."""
    return Path(shutil.copytree(stored[0], tmp_path / "d")), stored[1]


def test_answers_are_those_of_a_fresh_cache(model: PreTrainedModel, tmp_path: Path) -> None:
    with create(model, tmp_path / "d", title="a contract") as document:
        first = answers(document)
    assert first == [fresh(model, document, question) for question in QUESTIONS[:2]]
    with Document.open(model, tmp_path / "d", settings=SETTINGS) as again:
        assert again.about.title == "a contract"
        assert again.about.tokens == len(TEXT)
        assert again.tokens == TEXT
        assert answers(again) == first
        assert again.generation == 1
        assert again.written_bytes == 0


def test_one_prefill_whatever_is_asked(model: PreTrainedModel, tmp_path: Path) -> None:
    seen: list[int] = []
    with create(model, tmp_path / "d", on_tokens=lambda done, _: seen.append(done)) as document:
        assert seen[-1] == len(TEXT)
        size = sum(path.stat().st_size for path in (tmp_path / "d").iterdir())
        outputs = document.ask([ids(9, seed=seed) for seed in range(4)], GREEDY)
        assert sum(path.stat().st_size for path in (tmp_path / "d").iterdir()) == size
    for output in outputs:
        assert output.run.stats.prefill.tokens == 9
        assert output.run.restored_tokens == len(TEXT)
        assert output.run.recomputed_tokens == 0
        written = output.stats.prefill.written_bytes + output.stats.decode.written_bytes
        assert written <= 4 * 3 * 4096, "the answer's groups, of three layers"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "opt"])
def test_other_families(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    with create(model, tmp_path / "d") as document:
        expected = [fresh(model, document, QUESTIONS[0])]
        assert answers(document, QUESTIONS[:1]) == expected
    with Document.open(model, tmp_path / "d", settings=SETTINGS) as document:
        assert answers(document, QUESTIONS[:1]) == expected


def test_a_cache_for_generate_and_a_batch(model: Any, tmp_path: Path) -> None:
    with create(model, tmp_path / "d") as document:
        alone = answers(document, QUESTIONS)
        tokens = torch.tensor([[*TEXT, *question] for question in QUESTIONS])
        with document.cache(new_tokens=40, batch_size=3) as cache:
            out = model.generate(
                input_ids=tokens, attention_mask=torch.ones_like(tokens),
                **cache_argument(model, cache), max_new_tokens=GREEDY.max_tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        for row, expected in enumerate(alone):
            assert out[row, tokens.shape[1] :].tolist()[: len(expected)] == expected


def test_other_policies_and_exact_mode(model: PreTrainedModel, tmp_path: Path) -> None:
    with create(model, tmp_path / "d") as document:
        everything = answers(document, policy="full", memory=None)
        assert answers(document, exact=True) == everything
        assert answers(document, verify=3) == everything
        one_token = [[question[0]] for question in QUESTIONS]
        assert answers(document, one_token, verify=3) == answers(document, one_token, exact=True)
        quest = Quest(group_tokens=8, window_tokens=8, selected_tokens=10**6)
        assert answers(document, policy=quest) == everything
        with pytest.raises(ConfigError, match="drops tokens"):
            document.cache(policy=H2O())


@pytest.mark.parametrize("policy", ["quest", "full", "louiskv", "dynakv", "hillinfer"])
def test_added_under_another_policy(policy: str, model: PreTrainedModel, tmp_path: Path) -> None:
    with create(model, tmp_path / "d", policy=policy) as document:
        first = answers(document, QUESTIONS[:1], exact=True)
    with Document.open(model, tmp_path / "d", settings=SETTINGS) as document:
        assert document.policy.name == policy
        assert answers(document, QUESTIONS[:1], exact=True) == first
        assert all(answers(document, QUESTIONS[:1]))


def test_a_chat_is_kept_and_resumed(
    model: PreTrainedModel, adapted: DocumentSettings, tmp_path: Path
) -> None:
    # All tokens are selected: those of answers are then what prefill would have made of them.
    everything = replace(POLICY, selected_tokens=10**6)
    with create(model, tmp_path / "d", settings=adapted, policy=everything) as document:
        first = answers(document, QUESTIONS[:2], keep=True)
        assert document.generation == 3
        held = document.about.tokens + len(document.about.pending)
        assert held == len(TEXT) + sum(map(len, QUESTIONS[:2])) + sum(map(len, first))
    with Document.open(model, tmp_path / "d", settings=adapted) as document:
        [third] = answers(document, QUESTIONS[2:])
        past = [*TEXT, *QUESTIONS[0], *first[0], *QUESTIONS[1], *first[1]]
        said = [*document.tokens, *document.about.pending]
    assert said == past
    with create(
        model, tmp_path / "whole", text=past[:-1], settings=adapted, policy=everything
    ) as document:
        assert answers(document, [[past[-1], *QUESTIONS[2]]]) == [third]


@pytest.mark.parametrize("shared", [0, 5, 8, 202, 203])
def test_what_texts_share_is_not_prefilled_again(
    shared: int, model: PreTrainedModel, adapted: DocumentSettings, tmp_path: Path
) -> None:
    text = [*TEXT[:shared], *ids(60, seed=9)]
    seen: list[int] = []
    with (
        create(model, tmp_path / "a", settings=adapted) as first,
        create(
            model,
            tmp_path / "b",
            text=text,
            begins_as=first,
            settings=adapted,
            on_tokens=lambda n, _: seen.append(n),
        ) as second,
        create(model, tmp_path / "c", text=text, settings=adapted) as alone,
    ):
        assert seen[0] == shared
        assert answers(second, QUESTIONS[:1]) == answers(alone, QUESTIONS[:1])


def test_the_same_text_again_is_a_copy(
    model: PreTrainedModel, copied: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    seen: list[int] = []
    with (
        Document.open(model, copied[0], settings=SETTINGS) as first,
        create(
            model, tmp_path / "b", begins_as=first, on_tokens=lambda n, _: seen.append(n)
        ) as second,
    ):
        assert seen == [len(TEXT)]
        assert answers(second) == copied[1]


CHANGES: dict[str, Callable[[Any], None]] = {
    "weights": lambda model: model.model.layers[1].mlp.down_proj.weight.data[3, 5].add_(0.25),
    "rope": lambda model: setattr(model.config, "rope_parameters", {
        **model.config.rope_parameters, "rope_theta": 20000.0}),
    "configuration": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    "dtype": lambda model: model.to(torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("field", sorted(CHANGES))
def test_another_model_is_refused_by_name(field: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    create(model, tmp_path / "d").close()
    CHANGES[field](model)
    with pytest.raises(DocumentMismatchError, match=rf"other settings: .*{field}"):
        Document.open(model, tmp_path / "d", settings=SETTINGS)


def test_another_adapter_is_refused(
    model: PreTrainedModel, adapted: DocumentSettings, tmp_path: Path
) -> None:
    create(model, tmp_path / "d", settings=adapted).close()
    with pytest.raises(DocumentMismatchError, match="settings: adapter"):
        Document.open(model, tmp_path / "d", settings=SETTINGS)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    loaded = load("recall")
    assert loaded.tokenizer is not None
    text = "The grass is green . " * 40
    settings = DocumentSettings(store="memory")
    with Document.create(loaded, text, tmp_path / "d", settings=settings) as document:
        [answer] = document.ask("The sky", GREEDY)
        assert answer.prompt == "The sky"
        assert answer.text
    changed = AutoTokenizer.from_pretrained(loaded.tokenizer.name_or_path)
    changed.add_tokens(["penstock"])
    with pytest.raises(DocumentMismatchError, match="settings: tokenizer"):
        Document.open(replace(loaded, tokenizer=changed), tmp_path / "d", settings=settings)


def test_bad_input(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="empty"):
        create(model, tmp_path / "d", text=[])
    with pytest.raises(PromptError, match="512 positions"):
        create(model, tmp_path / "d", text=ids(600))
    with pytest.raises(ConfigError, match="forgets tokens"):
        create(model, tmp_path / "d", policy="h2o")
    with pytest.raises(ConfigError, match="no policy"):
        create(model, tmp_path / "d", policy="kvswop")
    with pytest.raises(DocumentError, match="there is no document"):
        Document.open(model, tmp_path / "d")
    assert not list(tmp_path.iterdir()), "nothing is left of what failed"
    with create(model, tmp_path / "d") as document:
        with pytest.raises(ConfigError, match="is there already"):
            create(model, tmp_path / "d")
        with pytest.raises(PromptError, match="empty"):
            document.ask([[]], GREEDY)
        with pytest.raises(PromptError, match="tokenizer"):
            document.ask("Who ?", GREEDY)
        with pytest.raises(PromptError, match="512 positions"):
            document.ask([ids(400)], GREEDY)
        with pytest.raises(ConfigError, match="own policy alone"):
            document.ask(QUESTIONS, GREEDY, keep=True, policy="full")
    with pytest.raises(DocumentError, match="closed"):
        document.ask(QUESTIONS, GREEDY)


def ask_anew(model: PreTrainedModel, path: Path) -> None:
    with Document.open(model, path, settings=SETTINGS) as document:
        document.ask(QUESTIONS, GREEDY)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("unit", [0, 7, 25])
def test_a_damaged_unit_is_prefilled_again(
    unit: int, model: PreTrainedModel, copied: tuple[Path, list[list[int]]]
) -> None:
    path, expected = copied
    flip(path / "kv-1.units", unit * 4096 + 100)
    with Document.open(model, path, settings=SETTINGS) as document:
        outputs = document.ask(QUESTIONS[:2], GREEDY)
        assert [output.token_ids for output in outputs] == expected
        tokens = 8 if unit < 25 else len(TEXT) - 25 * 8
        assert outputs[0].run.recomputed_tokens == tokens
        assert outputs[0].run.restored_tokens == len(TEXT) - tokens
        assert outputs[1].run.recomputed_tokens == 0, "it was mended for good"
        assert not document.verify()
    with Document.open(model, path, settings=SETTINGS) as document:
        assert answers(document, QUESTIONS[:1]) == expected[:1]


def test_many_damaged_units_of_many_layers(
    model: PreTrainedModel, copied: tuple[Path, list[list[int]]]
) -> None:
    path, expected = copied
    for layer, unit in ((0, 3), (0, 4), (1, 4), (2, 11), (2, 25)):
        flip(path / f"kv-{layer}.units", unit * 4096)
    seen: list[tuple[int, int]] = []
    with Document.open(model, path, settings=SETTINGS) as document:
        recovery = document.recover(on_tokens=lambda *each: seen.append(each))
        assert recovery.recomputed_tokens == 3 * 8 + 3
        assert seen[-1] == (27, 27)
        assert str(recovery) == "restored 176 of 203 tokens, recomputed 27"
        assert answers(document) == expected


def test_a_file_that_was_cut_is_prefilled_again(
    model: PreTrainedModel, copied: tuple[Path, list[list[int]]]
) -> None:
    path, expected = copied
    os.truncate(path / "kv-2.units", 20 * 4096 + 5)
    with Document.open(model, path, settings=SETTINGS) as document:
        [first, *_] = document.ask(QUESTIONS[:1], GREEDY)
        assert first.run.recomputed_tokens == len(TEXT) - 20 * 8
        assert answers(document) == expected


KEYED = replace(SETTINGS, key=bytes(range(32)))


@pytest.mark.parametrize("policy", [POLICY, "quest"])
def test_nothing_of_an_encrypted_document_lies_in_the_open(
    policy: Any, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "caches").mkdir()
    written: list[bytes] = []
    write = file_space.write_all

    def spied(descriptor: int, offset: int, data: Any) -> None:
        written.append(bytes(data))
        write(descriptor, offset, data)

    for module in (direct_file, threaded_file):
        monkeypatch.setattr(module, "write_all", spied)
    settings = replace(KEYED, store=tmp_path / "caches")
    with create(
        model, tmp_path / "d", settings=settings, policy=policy, title="Merger"
    ) as document:
        expected = answers(document)
        with document.cache() as cache:
            tokens = cache.tiers.read_tokens(0, 0, 64)
    secret = tokens[0, 20, 0].contiguous().numpy().tobytes()
    stored = b"".join(path.read_bytes() for path in (tmp_path / "d").iterdir())
    for place in (stored, b"".join(written)):
        assert len(place) > 10_000
        assert secret[:16] not in place
        assert b"Merger" not in place
    with Document.open(model, tmp_path / "d", settings=settings) as document:
        assert answers(document, QUESTIONS[:1]) == expected[:1]
    with pytest.raises(DocumentError, match="give its key"):
        Document.open(model, tmp_path / "d", settings=SETTINGS)
    flip(tmp_path / "d" / "kv-0.units", 5000)
    with Document.open(model, tmp_path / "d", settings=settings) as document:
        assert answers(document) == expected


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_damaged_blob_is_made_again(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    with create(model, tmp_path / "d") as document:
        expected = answers(document, QUESTIONS[:1])
    for name in ("index-0", "groups", "windows"):
        copy = Path(shutil.copytree(tmp_path / "d", tmp_path / name))
        found = list(copy.glob(f"blob-*-{name}"))
        assert bool(found) == (name != "windows" or family == "gemma2")
        for path in found:
            flip(path, path.stat().st_size // 2)
        if found:
            with Document.open(model, copy, settings=SETTINGS) as document:
                assert answers(document, QUESTIONS[:1]) == expected
                assert not document.verify()


@pytest.mark.parametrize("pattern", ["blob-*-tokens", "seals-*", "manifest.json"])
def test_damage_that_cannot_be_mended_is_said(
    pattern: str, model: PreTrainedModel, copied: tuple[Path, list[list[int]]]
) -> None:
    folder, _ = copied
    [path] = folder.glob(pattern)
    flip(path, path.stat().st_size // 2)
    with pytest.raises((DocumentDamagedError, DocumentError)):
        ask_anew(model, folder)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        replace(SETTINGS, prefill_chunk_size=0)
