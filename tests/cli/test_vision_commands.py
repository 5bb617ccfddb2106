"""`--image` and `--video` of the commands, with a model that sees, saved in a folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.models.loader import LoadedModel, load
from penstock.testing.tiny_vision import IMAGE, tiny_picture, tiny_vision_model

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
FEW = ("--max-new-tokens", "4", "--memory", "16MiB", "--disk", "memory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tiny_vision_model("llava", folder=made)
    for number in range(2):
        Image.fromarray(tiny_picture(number)).save(made / f"{number}.png")
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder)


def run(*arguments: object, stdin: str | None = None) -> Any:
    result = CliRunner().invoke(app, [str(each) for each in arguments], input=stdin)
    assert result.exit_code == 0, result.output
    return result


def said(loaded: LoadedModel, given: Any) -> str:
    [output] = LLM(loaded, memory=None).generate(given, GREEDY, use_tqdm=False)
    return output.text


def asked(loaded: LoadedModel, messages: list[Any]) -> str:
    [output] = LLM(loaded, memory=None).chat(messages, GREEDY, use_tqdm=False)
    return output.text


def shown(text: str, *pictures: Path) -> dict[str, Any]:
    parts = [{"type": "image", "path": str(each)} for each in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def test_generate_shows_pictures(folder: Path, loaded: LoadedModel) -> None:
    assert loaded.processor is not None
    picture = folder / "0.png"
    result = run("generate", folder, "--prompt", "What?", "--image", picture, "--json", *FEW)
    assert json.loads(result.stdout)["answer"] == asked(loaded, [shown("What?", picture)])
    result = run(
        "generate", folder, "--raw", "--prompt", f"a {IMAGE} b", "--image", picture, "--json", *FEW
    )
    given = {"prompt": f"a {IMAGE} b", "multi_modal_data": {"image": picture}}
    assert json.loads(result.stdout)["answer"] == said(loaded, given)
    messages = folder / "messages.json"
    messages.write_text(json.dumps([shown("What?", picture)]))
    result = run("generate", folder, "--messages", messages, "--json", *FEW)
    assert json.loads(result.stdout)["answer"] == asked(loaded, [shown("What?", picture)])


def test_a_document_has_pictures_and_so_has_a_question(
    folder: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    pictures = [folder / "0.png", folder / "1.png"]
    text = tmp_path / "text.txt"
    text.write_text("a text of some words. ")
    library = ("--library", tmp_path / "shelf")
    run("doc", "add", folder, text, "--name", "one", "--image", pictures[0], *library,
        "--memory", "16MiB")  # fmt: skip
    result = run(
        "doc", "ask", "one", " what?", "--image", pictures[1], *library, "--json",
        "--max-new-tokens", "4",
    )  # fmt: skip
    given = {
        "prompt": f"{IMAGE}a text of some words. {IMAGE} what?",
        "multi_modal_data": {"image": pictures},
    }
    assert json.loads(result.stdout)[0]["answer"] == said(loaded, given)


def test_a_chat_shows_pictures(folder: Path, loaded: LoadedModel) -> None:
    pictures = [folder / "0.png", folder / "1.png"]
    lines = f"Look.\n/image {pictures[1]}\nAnd this?\n"
    result = run("chat", folder, "--image", pictures[0], *FEW, stdin=lines)
    messages = [shown("Look.", pictures[0])]
    answers = [asked(loaded, messages)]
    messages += [{"role": "assistant", "content": answers[0]}, shown("And this?", pictures[1])]
    answers.append(asked(loaded, messages))
    assert result.stdout.split("\n")[:2] == answers


def test_a_model_that_reads_refuses_pictures(folder: Path) -> None:
    result = CliRunner().invoke(
        app, ["generate", "recall", "--prompt", "x", "--image", str(folder / "0.png")]
    )
    assert result.exit_code != 0
    assert "takes no images" in " ".join(result.output.split())
