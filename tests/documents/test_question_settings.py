"""Questions behind a stored text take all settings that prompts do, or refuse them by name."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock import ConfigError, PromptError, SamplingParams
from penstock.documents.conversation import Conversation
from penstock.documents.document import Document
from penstock.documents.settings import DocumentSettings
from penstock.generation.engine import LLM
from penstock.models.loader import LoadedModel
from penstock.testing.tiny_chat import tiny_chat_model

TEXT = "The harbour was built in the year of the great storm . " * 4
QUESTIONS = ["Who built it ?", "When ?"]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_chat_model()


@pytest.fixture(scope="module")
def document(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Document]:
    path = tmp_path_factory.mktemp("documents") / "d"
    settings = DocumentSettings(store="memory", prefill_chunk_size=64)
    with Document.create(loaded, path=path, text=TEXT, memory=None, settings=settings) as made:
        yield made


def whole(loaded: LoadedModel, question: str, params: SamplingParams) -> Any:
    """The same through `LLM.generate`, text and question prefilled."""
    tokenizer: Any = loaded.tokenizer
    ids = [
        *tokenizer(TEXT)["input_ids"],
        *tokenizer(question, add_special_tokens=False)["input_ids"],
    ]
    return LLM(loaded, memory=None, store="memory").generate([ids], params)[0]


def test_each_question_has_its_own_settings(loaded: LoadedModel, document: Document) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=6, logprobs=2, repetition_penalty=1.4),
        SamplingParams(n=3, temperature=1.2, seed=5, top_k=40, max_tokens=4, logprobs=0),
    ]
    passed_on: list[tuple[int, str]] = []
    outputs = document.ask(
        QUESTIONS, params, on_text=lambda number, piece: passed_on.append((number, piece))
    )
    for question, each, output in zip(QUESTIONS, params, outputs, strict=True):
        expected = whole(loaded, question, each)
        assert output.prompt == question
        assert output.num_cached_tokens > len(TEXT) - 16
        for found, wanted in zip(output.outputs, expected.outputs, strict=True):
            assert found.token_ids == wanted.token_ids
            assert found.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-4)
    texts = [answer.text for output in outputs for answer in output.outputs]
    for number, text in enumerate(texts):
        assert "".join(piece for at, piece in passed_on if at == number) == text


def test_prompts_of_other_kinds(loaded: LoadedModel, document: Document) -> None:
    tokenizer: Any = loaded.tokenizer
    params = SamplingParams(temperature=0, max_tokens=3)
    encoded = tokenizer(QUESTIONS, add_special_tokens=False)
    given: list[Any] = [{"prompt": QUESTIONS[0]}, encoded]
    first, second, third = document.ask(given, params)
    assert first.token_ids == second.token_ids
    assert third.token_ids == document.ask(QUESTIONS[1], params)[0].token_ids


def test_without_settings_they_are_the_models_own(
    loaded: LoadedModel, document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded.model.generation_config, "temperature", 0.0)
    monkeypatch.setattr(loaded.model.generation_config, "max_new_tokens", 3)
    [output] = document.ask(QUESTIONS[0])
    [asked] = document.ask(QUESTIONS[0], SamplingParams(temperature=0, max_tokens=3))
    assert output.token_ids == asked.token_ids
    assert len(output.token_ids) == 3


def test_an_answer_may_take_all_the_room(document: Document) -> None:
    settings = SamplingParams(temperature=0, max_tokens=None, stop="e")
    [question] = document.questions_of(QUESTIONS[0], settings)
    assert question.max_tokens == 4096 - document.about.tokens - len(question.token_ids)


@pytest.mark.parametrize(
    ("fields", "keep", "said"),
    [
        ({"n": 2}, True, "one answer to a question is kept"),
        ({"prompt_logprobs": 1}, False, "truncate_prompt_tokens and prompt_logprobs are for"),
        ({"truncate_prompt_tokens": 9}, False, "truncate_prompt_tokens and prompt_logprobs are"),
        ({"allowed_token_ids": [900]}, False, "allowed_token_ids has token 900"),
    ],
)
def test_refusals(document: Document, fields: dict[str, Any], keep: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        document.ask(QUESTIONS[0], SamplingParams(**fields), keep=keep)
    with pytest.raises(ConfigError, match="there are 2 questions and 1 sampling_params"):
        document.ask(QUESTIONS, [SamplingParams()])
    several: Any = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    with pytest.raises(PromptError, match="there are 2 prompts; give one"):
        Document.create(document._opened.loaded, text=several, path="unused", memory=None)


def test_a_chat_has_one_answer(loaded: LoadedModel) -> None:
    with (
        Conversation(loaded, memory=None, settings=DocumentSettings(store="memory")) as chat,
        pytest.raises(ConfigError, match="a chat goes on from one answer"),
    ):
        chat.ask("Where ?", SamplingParams(n=2))
