"""A prompt as a conversation: by the model's chat template where it has one, and raw if asked."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.generation.engine import LLM
from penstock.generation.prompts import encode
from penstock.models.loader import LoadedModel
from penstock.testing.tiny_chat import tiny_chat_model

USER = "<|im_start|>user\nHello<|im_end|>\n"
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
TURN = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    return {"chat": tiny_chat_model(), "plain": tiny_chat_model(template=None)}


@pytest.fixture
def asked(models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens that a model was asked, as they reached it."""
    seen: list[list[int]] = []
    generate = LLM.generate

    def note(self: LLM, *given: Any, **more: Any) -> Any:
        outputs = generate(self, *given, **more)
        seen.extend(each.prompt_token_ids for each in outputs)
        return outputs

    monkeypatch.setattr(LLM, "generate", note)
    monkeypatch.setattr("penstock.generation.model_choice.load", lambda name, **_: models[name])
    return seen


def run(*words: str) -> Any:
    few = ("--max-new-tokens", "1", "--disk", "memory")
    return CliRunner().invoke(app, ["generate", *words, *few])


def file_of(tmp_path: Path, content: object) -> str:
    path = tmp_path / "messages.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_prompt_is_a_message_where_there_is_a_template(
    asked: list[list[int]], models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    messages = file_of(tmp_path, {"messages": [{"role": "user", "content": "Hello"}]})
    for words, text in (
        (("chat", "--prompt", "Hello"), USER + TURN),
        (("chat", "--prompt", "Hello", "--system", "Be brief."), SYSTEM + USER + TURN),
        (("chat", "--messages", messages), USER + TURN),
        (("chat", "--messages", messages, "--system", "Be brief."), SYSTEM + USER + TURN),
    ):
        result = run(*words)
        assert result.exit_code == 0, result.output
        # The template writes special tokens: none is put in front a second time.
        assert asked.pop() == encode(models["chat"], text, alone=False)
    for model, more in (("chat", ["--raw"]), ("plain", [])):
        assert run(model, "--prompt", "Hello", *more).exit_code == 0
        assert asked.pop() == encode(models["chat"], "Hello")


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        (("--prompt", "x", "--raw", "--system", "y"), None, "--raw is for a plain text"),
        (("--raw",), [], "--raw is for a plain text"),
        (("--prompt", "x"), [], "one of --prompt, --prompt-file and --messages"),
        ((), "nothing", "is no JSON"),
        ((), [], "holds no messages"),
        ((), ["text"], "holds no messages"),
        ((), {"message": []}, "holds no messages"),
        ((), [{"content": "no role"}], "has no role"),
        (("--system", "y"), [{"role": "system", "content": "x"}], "begins with a system message"),
    ],
)
def test_what_cannot_be_asked(
    asked: list[list[int]], tmp_path: Path, words: tuple[str, ...], content: object, said: str
) -> None:
    given = () if content is None else ("--messages", file_of(tmp_path, content))
    result = run("chat", *words, *given)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())
    assert not asked


def test_messages_need_a_template(asked: list[list[int]], tmp_path: Path) -> None:
    messages = file_of(tmp_path, [{"role": "user", "content": "Hello"}])
    for words in (("--messages", messages), ("--prompt", "x", "--system", "y")):
        result = run("plain", *words)
        assert "needs a chat template, and this model has none" in result.stderr
    assert not asked
