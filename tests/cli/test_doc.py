"""`penstock doc`: answers on stdout, everything else on stderr, and bad input in one line."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.models import loader
from penstock.models.loader import LoadedModel

SENTENCES = "The grass is green . The sky is blue . The sun is yellow . Here we go . "
TEXT = f"{SENTENCES}There and back again . " * 10
OTHER = "Here we go . There and back again . " * 30
ASKED = "The grass is"
FEW = ("--max-new-tokens", 3, "--disk", "memory")


@pytest.fixture(scope="module")
def _models() -> dict[Any, LoadedModel]:
    return {}


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch, _models: dict[Any, LoadedModel]) -> None:
    """One model for all commands; in float32, in which no two of its tokens are near a tie."""
    load = loader.load

    def cached(
        model: str, *, dtype: str | None = None, device: str = "cpu", **_: Any
    ) -> LoadedModel:
        dtype = dtype or "float32"
        if model != "recall":
            return load(model, dtype=dtype, device=device)
        key = (dtype, device)
        if key not in _models:
            _models[key] = load(model, dtype=dtype, device=device)
        return _models[key]

    monkeypatch.setattr(loader, "load", cached)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def answer_to_it() -> str:
    """What the plain model says to `ASKED` behind `TEXT`, in three tokens."""
    loaded = loader.load("recall", dtype="float32")
    assert loaded.tokenizer is not None
    model: Any = loaded.model
    inputs = loaded.tokenizer(f"{TEXT}{ASKED}", return_tensors="pt")
    said = model.generate(**inputs, max_new_tokens=3)[0, inputs["input_ids"].shape[1] :]
    text: str = loaded.tokenizer.decode(said)
    return text


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the document "green", to be copied."""
    root = tmp_path_factory.mktemp("stored")
    (root / "text.txt").write_text(TEXT)
    arguments = ["doc", "add", "recall", str(root / "text.txt"), "--name", "green"]
    arguments += ["--dtype", "float32"]
    done = CliRunner().invoke(app, [*arguments, "--library", str(root / "lib"), "--disk", "memory"])
    assert done.exit_code == 0, done.stderr
    return root / "lib"


@pytest.fixture
def library(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "lib"
    shutil.copytree(stored, root)
    monkeypatch.setenv("PENSTOCK_LIBRARY", str(root))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "other.txt").write_text(OTHER)
    return root


def run(*arguments: object, **extra: Any) -> Any:
    done = CliRunner().invoke(app, ["doc", *map(str, arguments)], **extra)
    assert done.exit_code == 0, done.stderr
    return done


def refused(*arguments: object, **extra: Any) -> str:
    """The one line of a command that cannot be done."""
    done = CliRunner().invoke(app, ["doc", *map(str, arguments)], **extra)
    assert done.exit_code in (1, 2), done.output
    assert isinstance(done.exception, SystemExit)
    assert done.stdout == ""
    # What to try stands behind it.
    lines = [line for line in done.stderr.splitlines() if not line.startswith("try: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert "unexpected" not in lines[0]
    return str(lines[0])


def test_add_says_what_it_did(library: Path) -> None:
    done = run("add", "recall", "other.txt", "--name", "more", "--disk", "memory")
    assert done.stdout == ""
    assert "prefill 100 %" in done.stderr
    # How much depends on the columns that the plan takes.
    assert re.search(r"^more: 271 tokens; [45]\.\d+ MiB written$", done.stderr, re.MULTILINE)
    assert "penstock doc ask more" in done.stderr
    again = run("add", "recall", "text.txt", "--name", "copy", "--disk", "memory")
    assert "copy: 241 tokens, 241 of them taken over from green" in again.stderr
    alone = run("add", "recall", "text.txt", "--name", "alone", "--alone", "--disk", "memory")
    assert "taken over" not in alone.stderr
    assert run("ask", "copy", ASKED, *FEW).stdout == run("ask", "alone", ASKED, *FEW).stdout


def test_the_answers_alone_are_on_stdout(library: Path, answer_to_it: str) -> None:
    one = run("ask", "green", ASKED, *FEW)
    assert one.stdout == f"{answer_to_it}\n"
    assert "behind 241 of 241 stored tokens" in one.stderr
    assert "prefill again" not in one.stderr
    assert ASKED not in one.stderr
    two = run("ask", "green", ASKED, "The sun", *FEW)
    assert two.stdout.splitlines()[0] == answer_to_it
    assert len(two.stdout.splitlines()) == 2
    assert two.stderr.splitlines()[:2] == [ASKED, "The sun"]


def test_json_is_one_list(library: Path, answer_to_it: str) -> None:
    done = run("ask", "green", ASKED, "The sun", *FEW, "--json")
    assert done.stderr == ""
    first, second = json.loads(done.stdout)
    assert (first["question"], first["answer"]) == (ASKED, answer_to_it)
    assert second["question"] == "The sun"
    for answer in (first, second):
        assert answer["restored_tokens"] == 241
        assert answer["recomputed_tokens"] == 0
        assert answer["prefill"]["tokens"] < 10
        assert answer["simulated"] is None


def test_a_simulated_disk_is_called_so(library: Path, answer_to_it: str) -> None:
    options = ("ask", "green", ASKED, "--max-new-tokens", 3, "--disk", "nvme")
    [answer] = json.loads(run(*options, "--json").stdout)
    assert answer["simulated"] == "nvme"
    assert answer["answer"] == answer_to_it
    assert "(simulated disk)" in run(*options).stderr


def test_a_chat_is_kept(library: Path) -> None:
    run("ask", "green", ASKED, *FEW, "--keep")
    [once] = json.loads(run("ls", "--json").stdout)["documents"]
    run("ask", "green", "sky is", *FEW, "--keep")
    [twice] = json.loads(run("ls", "--json").stdout)["documents"]
    assert 241 < once["tokens"] < twice["tokens"]
    assert (once["generation"], twice["generation"]) == (2, 3)
    assert (once["asks"], twice["asks"]) == (1, 2)
    assert once["written_bytes"] < twice["written_bytes"]
    run("verify", "green")


def test_the_text_may_come_through_a_pipe(library: Path, answer_to_it: str) -> None:
    run("add", "recall", "-", "--name", "piped", "--alone", "--disk", "memory", input=TEXT)
    assert run("ask", "piped", ASKED, *FEW).stdout == f"{answer_to_it}\n"
    assert json.loads(run("show", "piped", "--json").stdout)["title"] == ""


def test_ls_and_show(library: Path) -> None:
    run("ask", "green", ASKED, *FEW)
    listed = run("ls")
    assert listed.stderr == ""
    assert "green" in listed.stdout
    assert "241" in listed.stdout
    assert "written today (UTC)" in listed.stdout
    shown = run("show", "green")
    assert "text.txt" in shown.stdout
    assert "kvswap" in shown.stdout
    assert "once, last" in shown.stdout
    for screen in (listed, shown):
        assert max(map(len, screen.stdout.splitlines())) <= 80
        assert "…" not in screen.stdout
    whole = json.loads(run("ls", "--json").stdout)
    [entry] = whole["documents"]
    document = json.loads(run("show", "green", "--json").stdout)
    assert entry.items() <= document.items()
    assert document["about"]["tokens"] == 241
    assert document["identity"]["dtype"] == "float32"
    assert whole["size_bytes"] == entry["size_bytes"]
    assert whole["written_today_bytes"] == entry["written_bytes"]


def test_a_models_name_is_listed_as_it_is(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "[red]"
    shutil.copytree(Path(loader.__file__).parent / "recall", folder)
    run("add", "[red]", "text.txt", "--name", "red", "--alone", "--disk", "memory")
    monkeypatch.setenv("COLUMNS", "500")  # it is a path, which a narrower terminal folds
    assert f"{folder} " in run("ls").stdout
    listed = {
        each["name"]: each["model"] for each in json.loads(run("ls", "--json").stdout)["documents"]
    }
    assert listed["red"] == str(folder)


def test_an_empty_library(tmp_path: Path) -> None:
    done = run("ls", "--library", tmp_path / "new")
    assert "no documents" in done.stdout
    assert "penstock doc add" in done.stdout
    assert json.loads(run("ls", "--json", "--library", tmp_path / "new").stdout)["documents"] == []


def test_what_cannot_be_read_is_listed_with_the_reason(library: Path) -> None:
    long = "a" * 100
    shutil.copytree(library / "green", library / long)
    (library / long / "manifest.json").write_text("{}")
    (library / "writes.json").write_text("[")
    done = run("ls")
    assert "unreadable" in done.stdout
    assert f"{long}: unreadable: " in done.stdout
    assert "begun anew" in done.stdout
    rows = [line for line in done.stdout.splitlines() if "unreadable: " not in line]
    assert "…" not in "".join(rows)
    assert f"{long}: " in CliRunner().invoke(app, ["doc", "verify", long, "green"]).stderr


def test_verify_and_repair(library: Path, answer_to_it: str) -> None:
    assert "green: sound, " in run("verify", "green").stderr
    path = library / "green" / "kv-2.units"
    data = bytearray(path.read_bytes())
    data[3 * 8192] ^= 1  # a unit: four tokens in float32
    path.write_bytes(data)
    done = CliRunner().invoke(app, ["doc", "verify", "green"])
    assert done.exit_code == 1
    assert "green: layer 2: damaged unit 3\n" in done.stderr
    assert "verify --repair green" in done.stderr
    mended = run("verify", "--repair", "green")
    assert "damage was found: 4 tokens are prefilled again" in mended.stderr
    assert "green: restored 237 of 241 tokens, recomputed 4" in mended.stderr
    assert "green: sound, " in run("verify", "green").stderr, "what was mended is in other units"
    assert run("ask", "green", ASKED, *FEW).stdout == f"{answer_to_it}\n"


def test_damage_is_mended_while_asking(library: Path, answer_to_it: str) -> None:
    path = library / "green" / "kv-2.units"
    data = bytearray(path.read_bytes())
    data[3 * 8192] ^= 1  # a unit: four tokens in float32
    path.write_bytes(data)
    done = run("ask", "green", ASKED, *FEW)
    assert done.stdout == f"{answer_to_it}\n"
    assert "damage was found: 4 tokens are prefilled again" in done.stderr
    assert "237 of 241" in done.stderr
    assert "4 recomputed" in " ".join(done.stderr.replace("│", "").split())
    assert "prefilled again" not in run("ask", "green", ASKED, *FEW).stderr


def test_a_document_knows_its_dtype(library: Path) -> None:
    run("add", "recall", "text.txt", "--name", "half", "--dtype", "bfloat16", "--disk", "memory")
    assert run("ask", "half", ASKED, *FEW).stdout


def test_rm_and_gc(library: Path) -> None:
    shutil.copytree(library / "green", library / "half")
    (library / "half" / "manifest.json").unlink()
    (library / "notes").mkdir()
    done = run("gc")
    assert "removed half, which was never finished" in done.stdout
    assert "left notes: not a document" in done.stdout
    assert "MiB freed" in done.stdout
    shutil.copytree(library / "green", library / "blue")
    assert "'red'" in refused("rm", "blue", "red")
    assert (library / "blue").exists(), "all or none"
    assert run("rm", "blue", "green", "blue").stdout == "removed blue\nremoved green\n"
    assert json.loads(run("ls", "--json").stdout)["documents"] == []


def test_encrypted(library: Path, tmp_path: Path, answer_to_it: str) -> None:
    pytest.importorskip("cryptography")
    keys = [f"file:{tmp_path / name}" for name in ("key", "wrong")]
    for name in ("key", "wrong"):
        assert f"--key file:{tmp_path / name}" in run("key", tmp_path / name).stdout
    assert "there already" in refused("key", tmp_path / "key")
    right, wrong = keys
    options = ("--name", "secret", "--title", "mine alone", "--key", right, "--disk", "memory")
    run("add", "recall", "text.txt", *options)
    assert run("ask", "secret", ASKED, *FEW, "--key", right).stdout == f"{answer_to_it}\n"
    plain, secret = json.loads(run("ls", "--json").stdout)["documents"]
    assert (secret["encrypted"], secret["tokens"], secret["title"]) == (True, None, None)
    assert (plain["encrypted"], plain["tokens"]) == (False, 241)
    known = json.loads(run("ls", "--json", "--key", right).stdout)["documents"][1]
    assert (known["tokens"], known["title"]) == (241, "mine alone")
    assert b"mine alone" not in b"".join(
        path.read_bytes() for path in (library / "secret").iterdir()
    )
    assert "mine alone" not in run("show", "secret").stdout
    assert "give its key" in refused("ask", "secret", ASKED, *FEW)
    assert "give its key" in refused("verify", "secret")
    assert "not that of the document" in refused("ask", "secret", ASKED, "--key", wrong)
    assert "not encrypted" in refused("ask", "green", ASKED, "--key", right)
    assert "mine alone" not in run("ls", "--key", wrong).stdout


ASK = ("ask", "green", ASKED, *FEW)
ADD = ("add", "recall", "text.txt", "--name", "new", "--disk", "memory")
NAMED = "cannot be a document's name"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ask", "grean", ASKED), "there is no document 'grean'.* green"),
        (("show", "grean"), "there is no document 'grean'"),
        (("verify", "grean"), "there is no document 'grean'"),
        (("rm", "grean"), "there is no document 'grean'"),
        (("ask", "../green", ASKED), NAMED),
        (("ask", "..", ASKED), NAMED),
        (("add", "recall", "text.txt", "--name", "a/b"), NAMED),
        (("add", "recall", "text.txt", "--name", "../b"), NAMED),
        (("add", "recall", "text.txt", "--name", ""), "name is empty"),
        (("add", "recall", "text.txt", "--name", "green"), "a document 'green' already"),
        (("add", "recall", "empty.txt", "--name", "new"), "the text empty.txt is empty"),
        (("add", "recall", "bytes.txt", "--name", "new"), "the text bytes.txt is not UTF-8"),
        (("add", "recall", "nowhere.txt", "--name", "new"), "cannot read the text nowhere.txt"),
        (("add", "recall", ".", "--name", "new"), "cannot read the text ."),
        (("add", "nowhere", "text.txt", "--name", "new"), "no model folder nowhere"),
        ((*ADD, "--max-disk", "3 cups"), "cannot read '3 cups' as a size"),
        ((*ADD, "--max-disk", "0"), "--max-disk 0 leaves no room"),
        ((*ADD, "--max-disk", "1KiB"), "has no room for"),
        ((*ADD, "--max-writes-per-day", "x"), "cannot read 'x' as a size"),
        ((*ADD, "--max-writes-per-day", "1KiB"), "a whole day's budget of 1 KiB"),
        ((*ADD, "--policy", "h2o"), "h2o forgets tokens"),
        ((*ADD, "--policy", "kvswop"), "no policy 'kvswop'"),
        ((*ADD, "--memory", "4KiB"), "smallest budget that would do"),
        ((*ADD, "--memory", "3 cups"), "cannot read '3 cups'"),
        ((*ADD, "--adapter", "nowhere"), "cannot read the adapter nowhere"),
        ((*ADD, "--key", "file:nowhere"), "cannot read the key file"),
        ((*ADD, "--key", "mine"), "a key comes from file:PATH"),
        ((*ADD, "--chunk", "0"), "at least 1"),
        ((*ASK, "--dtype", "bfloat16"), r"dtype \(float32 there, bfloat16 here\)"),
        ((*ASK, "--model", "nowhere"), "no model folder nowhere"),
        ((*ASK, "--memory", "4KiB"), "smallest budget that would do"),
        ((*ASK, "--policy", "h2o"), "h2o drops tokens"),
        ((*ASK, "--policy", "kvswop"), "no policy 'kvswop'"),
        ((*ASK, "--max-new-tokens", "0"), "--max-new-tokens 0"),
        ((*ASK, "--keep", "--exact"), "own policy alone"),
        ((*ASK, "--temperature", "-1"), "temperature"),
        (("ask", "green", " "), "the question is empty"),
        (("ls", "--library", "text.txt"), "text.txt is not a folder"),
        (("ls", "--library", "text.txt/lib"), "is not a folder"),
        (("ls", "--library", "~nobody-here/lib"), "--library ~nobody-here/lib: there is no such"),
    ],
    ids=lambda each: " ".join(map(str, each)) if isinstance(each, tuple) else None,
)
def test_bad_input(arguments: tuple[object, ...], words: str, library: Path) -> None:
    Path("empty.txt").write_text(" \n")
    Path("bytes.txt").write_bytes(b"\xff\xfe\x00")
    before = sorted(path.name for path in library.iterdir())
    line = refused(*arguments)
    assert re.search(words, line), line
    left = {*(path.name for path in library.iterdir())} - {"library-settings.json"}
    assert sorted(left) == before


def test_bad_text_on_stdin(library: Path) -> None:
    new = ("add", "recall", "-", "--name", "new")
    assert "stdin is not UTF-8" in refused(*new, input=b"\xff\xfe")
    assert "the text on stdin is empty" in refused(*new, input=b"")


def test_limits_are_kept_for_later_commands(library: Path) -> None:
    run(*ADD, "--max-disk", "1GiB", "--max-writes-per-day", "2GiB")
    run("add", "recall", "other.txt", "--name", "more", "--max-disk", "none", "--disk", "memory")
    listed = json.loads(run("ls", "--json").stdout)
    assert listed["max_disk_bytes"] is None
    assert listed["writes_per_day_bytes"] == 2 << 30
    refused("add", "recall", "nowhere.txt", "--name", "x", "--max-disk", "1KiB")
    assert json.loads(run("ls", "--json").stdout)["max_disk_bytes"] is None, "nothing was added"


def test_what_was_asked_least_recently_goes(library: Path) -> None:
    used = json.loads(run("ls", "--json").stdout)["size_bytes"]
    options = ("--name", "new", "--max-disk", int(1.6 * used), "--disk", "memory")
    done = run("add", "recall", "other.txt", *options)
    assert "removed green, to make room" in done.stderr
    [entry] = json.loads(run("ls", "--json").stdout)["documents"]
    assert entry["name"] == "new"


def test_a_document_of_another_model(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = loader.load

    def other(*arguments: Any, **options: Any) -> LoadedModel:
        loaded = cached("recall", **options)
        model = deepcopy(loaded.model)
        next(iter(model.parameters())).data.add_(0.5)
        return replace(loaded, model=model)

    monkeypatch.setattr(loader, "load", other)
    assert "other settings: weights" in refused(*ASK, "--model", "another")


@pytest.fixture
def read_only(library: Path) -> Iterator[Path]:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    library.chmod(0o500)
    yield library
    library.chmod(0o700)


def test_a_library_that_cannot_be_written(read_only: Path, answer_to_it: str) -> None:
    assert "Permission denied" in refused(*ADD)
    assert run(*ASK).stdout == f"{answer_to_it}\n"
