"""Models by their names on a hub, which is a server in this process."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants, file_download
from typer.testing import CliRunner

from penstock import load
from penstock.cli.main import EXIT_BAD_INPUT, app
from penstock.core.errors import ConfigError, ModelLoadError, UnsupportedModelError
from penstock.models import loader
from penstock.models.loader import fetch_hub_model
from penstock.testing.tiny_chat import tiny_chat_model
from tests.models.hub_server import TOKEN, Hub

NAME = "someone/tiny"
WEIGHTS = "model.safetensors"
SOURCE = str(Path(loader.__file__).parents[2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_chat_model(folder=folder)
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the model; huggingface_hub asks it, as if its variables had been set so."""
    hub = Hub()
    hub.add(NAME, folder, **{"pytorch_model.bin": b"pickle", "own.py": b"raise SystemExit"})
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    pattern = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", pattern)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


def quiet(what: str, done: int, total: int) -> None:
    """Progress that is not looked at."""


def weights_of(model: Any) -> list[torch.Tensor]:
    return [weight for _, weight in sorted(model.state_dict().items())]


def test_a_name_is_fetched_with_progress_and_then_found_in_the_cache(
    hub: Hub, folder: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    loaded = load(NAME, on_bytes=lambda *each: told.append(each))
    assert loaded.name == NAME
    there = load(folder)
    for mine, wanted in zip(weights_of(loaded.model), weights_of(there.model), strict=True):
        assert torch.equal(mine, wanted)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.chat_template == getattr(there.tokenizer, "chat_template", "")
    size = (folder / WEIGHTS).stat().st_size
    assert (f"fetching {NAME}", size, size) in told
    assert (f"checking {WEIGHTS}", size, size) in told
    assert all(done <= total for _, done, total in told)
    assert hub.fetched("pytorch_model.bin") == hub.fetched("own.py") == []
    hub.asked.clear()
    load(NAME)
    assert hub.asked == []


def test_a_cut_is_gone_on_from(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)  # what is written at once
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
    hub.cut[WEIGHTS] = 120_000
    told: list[int] = []
    try:
        fetch_hub_model(NAME, on_bytes=lambda what, done, total: told.append(done))
    except ModelLoadError:  # older releases of huggingface_hub leave it to the next run
        fetch_hub_model(NAME, on_bytes=lambda what, done, total: told.append(done))
    assert [each.split()[-1] for each in hub.fetched(WEIGHTS)[1:]] == ["bytes=100000-"]
    assert {50_000, 100_000, 150_000} <= set(told)
    load(NAME, offline=True)


def test_a_fetch_that_ended_early_goes_on_with_what_is_missing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(what: str, done: int, total: int) -> None:
        if what == f"checking {WEIGHTS}":
            raise Killed

    with pytest.raises(Killed):
        fetch_hub_model(NAME, on_bytes=die)
    with pytest.raises(ModelLoadError, match=r"no model folder someone/tiny"):
        load(NAME, offline=True)  # which commit is main was not yet written down
    hub.asked.clear()
    checked: list[str] = []
    fetch_hub_model(NAME, on_bytes=lambda what, done, total: checked.append(what))
    assert hub.fetched(WEIGHTS) == hub.fetched("tokenizer.json") == []
    assert {f"checking {WEIGHTS}", "checking tokenizer.json"} <= set(checked)


@pytest.mark.parametrize("file", [WEIGHTS, "tokenizer.json"])
def test_a_wrong_checksum(hub: Hub, file: str) -> None:
    hub.damaged.add(file)
    said = rf"{file} is damaged: its SHA-.*it was removed, fetch it again: penstock fetch {NAME}"
    with pytest.raises(ModelLoadError, match=said):
        load(NAME)
    with pytest.raises(ModelLoadError, match="no model folder"):
        load(NAME, offline=True)
    fetch_hub_model(NAME, on_bytes=quiet)
    assert len(hub.fetched(file)) == 2


def test_a_private_model(hub: Hub) -> None:
    hub.repositories[NAME].private = True
    with pytest.raises(ModelLoadError, match=r"if it is private, log in with: hf auth login"):
        load(NAME)
    fetch_hub_model(NAME, token=TOKEN, on_bytes=quiet)


def test_a_gated_model(hub: Hub) -> None:
    hub.repositories[NAME].gated = True
    with pytest.raises(ModelLoadError, match=rf"is gated: accept its conditions at .*/{NAME}"):
        load(NAME)
    load(NAME, token=TOKEN)


def test_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match=f"with a network, run: penstock fetch {NAME};"):
        load(NAME, offline=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=f"with a network, run: penstock fetch {NAME};"):
        load(NAME)
    assert hub.asked == []


def test_offline_with_a_part(hub: Hub) -> None:
    folder = fetch_hub_model(NAME, on_bytes=quiet)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelLoadError, match=rf"not whole .*{WEIGHTS} is missing.*penstock fetch"):
        load(NAME, offline=True)
    load(NAME)


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelLoadError, match=rf"cannot be reached .*run: penstock fetch {NAME}"):
        load(NAME)


def test_a_hub_that_fails(hub: Hub) -> None:
    hub.status = 500
    with pytest.raises(ModelLoadError, match=r"answers 500 .*try again later"):
        load(NAME)


def test_a_revision(hub: Hub, folder: Path) -> None:
    repository = hub.repositories[NAME]
    [first] = repository.commits
    config = json.loads((folder / "config.json").read_text()) | {"rope_theta": 5.0}
    files = repository.commits[first] | {"config.json": json.dumps(config).encode()}
    second = repository.commit(files, "tuned")
    assert fetch_hub_model(NAME, revision="tuned", on_bytes=quiet).name == second
    assert fetch_hub_model(NAME, on_bytes=quiet).name == first
    hub.asked.clear()
    for revision, commit in (("tuned", second), (second, second), ("main", first), (None, first)):
        path = Path(load(NAME, revision=revision, offline=True).model.config.name_or_path)
        assert path.name == commit
    assert hub.asked == []
    with pytest.raises(ModelLoadError, match="has no revision 'nowhere'"):
        load(NAME, revision="nowhere")
    with pytest.raises(ModelLoadError, match=f"penstock fetch {NAME} --revision nowhere"):
        load(NAME, revision="nowhere", offline=True)


def test_fetch_takes_what_is_new(hub: Hub) -> None:
    fetch_hub_model(NAME, on_bytes=quiet)
    repository = hub.repositories[NAME]
    [first] = repository.commits
    second = repository.commit(repository.commits[first] | {"generation_config.json": b"{}"})
    hub.asked.clear()
    assert fetch_hub_model(NAME, on_bytes=quiet).name == second
    assert hub.fetched(WEIGHTS) == []


def test_a_model_in_parts(hub: Hub, folder: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    load(folder).model.save_pretrained(parts, max_shard_size="100KB")
    (parts / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    hub.add("someone/parts", parts)
    load("someone/parts")
    first = sorted(parts.glob("model-*.safetensors"))[0].name
    (fetch_hub_model("someone/parts", on_bytes=quiet) / first).unlink()
    with pytest.raises(ModelLoadError, match=f"{first} is missing"):
        load("someone/parts", offline=True)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"pytorch_model.bin": b""}, r"only as pickles \(pytorch_model\.bin\), which can run code"),
        ({}, "has no model.safetensors"),
    ],
)
def test_safetensors_alone(hub: Hub, files: dict[str, bytes], said: str) -> None:
    hub.repositories[NAME].commit({"config.json": b"{}", **files})
    with pytest.raises(ModelLoadError, match=said):
        load(NAME)
    assert hub.fetched("pytorch_model.bin") == []


@pytest.mark.parametrize(
    ("file", "said"),
    [("adapter_config.json", "is a PEFT adapter"), ("a.Q4_0.gguf", f"hf download {NAME} a.Q4_0")],
)
def test_what_is_no_model(hub: Hub, file: str, said: str) -> None:
    hub.repositories[NAME].commit({file: b"{}"})
    with pytest.raises(ModelLoadError, match=said):
        load(NAME)


def test_what_cannot_work_is_refused_before_its_weights(hub: Hub) -> None:
    files = {"config.json": b'{"model_type": "t5"}', WEIGHTS: b"gigabytes"}
    hub.repositories[NAME].commit(files)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        load(NAME)
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    hub.repositories[NAME].commit(files | {"config.json": json.dumps(own).encode()})
    with pytest.raises(ModelLoadError, match="--trust-remote-code"):
        load(NAME)
    assert hub.fetched(WEIGHTS) == []


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_its_own_where_it_is_trusted(
    hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    [commit] = hub.repositories[NAME].commits
    files = hub.repositories[NAME].commits[commit] | {"own.py": OWN_CODE.encode()}
    hub.repositories[NAME].commit(files | {"config.json": json.dumps(config).encode()})
    assert type(load(NAME, trust_remote_code=True).model).__name__ == "OwnModel"


def test_a_name_that_cannot_be(hub: Hub) -> None:
    with pytest.raises(ConfigError, match="can be no name of a model"):
        fetch_hub_model("no/such/name", on_bytes=quiet)
    assert hub.asked == []


ASKED = ("generate", NAME, "--prompt", "to", "--max-new-tokens", "1", "--disk", "memory")


def test_commands(hub: Hub) -> None:
    done = CliRunner().invoke(app, [*ASKED, "--offline"])
    assert done.exit_code == EXIT_BAD_INPUT
    assert f"with a network, run: penstock fetch {NAME}" in done.stderr
    done = CliRunner().invoke(app, ["fetch", NAME])
    assert done.exit_code == 0, done.stderr
    assert f"penstock generate {NAME} --prompt TEXT" in done.stdout
    hub.asked.clear()
    done = CliRunner().invoke(app, [*ASKED, "--offline"])
    assert done.exit_code == 0, done.stderr
    assert hub.asked == []
    for words in (("--to", "there"), ("--from", "there")):
        done = CliRunner().invoke(app, ["fetch", NAME, *words])
        assert done.exit_code == EXIT_BAD_INPUT
        assert "are for released models" in done.stderr


FETCH = """
import sys
from penstock.models.hub import HubModel
HubModel(name=sys.argv[1]).fetch(lambda folder: None, lambda what, done, total: None)
"""
"""What `penstock fetch` does behind its import of torch, which takes seconds."""


def test_the_variables_alone(hub: Hub, tmp_path: Path) -> None:
    """In a process of its own: huggingface_hub reads them when it is imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "PYTHONPATH": SOURCE}
    command = [sys.executable, "-c", FETCH, NAME]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hub" / "models--someone--tiny" / "refs" / "main").is_file()
