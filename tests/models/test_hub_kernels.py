"""A model folder makes nobody fetch code: with the `kernels` library there, it is never asked."""

import json
import os
import shutil
from pathlib import Path

import pytest
from transformers.utils import import_utils

from penstock.core.errors import ModelLoadError, UnsupportedModelError
from penstock.models import loader
from penstock.models.loader import BUNDLED
from penstock.models.model_config import read_config
from penstock.testing.tiny_chat import tiny_chat_model
from tests.ready_process import ReadyProcess

KERNELS = """
import os, sys, types
def _note(*args, **options):
    with open(os.environ["ASKED"], "a") as file:
        file.write(f"{args} {options}\\n")
    raise RuntimeError(f"fetches {args}")
class _Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()
class _Any(metaclass=_Kind):
    def __init__(self, *_, **__): pass
    def __or__(self, _): return self
    def __call__(self, made=None, *_, **__): return made if made is not None else self
def _plain(*_, **__): return lambda made: made
get_kernel = load_kernel = get_local_kernel = _note
use_kernel_forward_from_hub = use_kernelized_func = replace_kernel_forward_from_hub = _plain
register_kernel_mapping = use_kernel_mapping = kernelize = _plain
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Any
"""
OPEN = """
import gc, sys
from pathlib import Path
gc.freeze()  # or each collection walks what is there already
# What forks this process has imported them without that library.
for name in [name for name in sys.modules if name.split(".")[0] in ("penstock", "transformers")]:
    del sys.modules[name]
sys.path.insert(0, sys.argv.pop(1))
from transformers.utils import is_kernels_available
assert is_kernels_available()
from penstock.core.errors import PenstockError
from penstock.models.kv_shapes import kv_shape
from penstock.models.loader import load
from penstock.models.reward_model import RewardModelScorer
for folder in map(Path, sys.argv[1:]):
    for opener in (load, kv_shape, RewardModelScorer):
        try:
            opener(folder)
            print(folder.name, opener.__name__, "opened")
        except PenstockError as error:
            print(folder.name, opener.__name__, type(error).__name__)
"""
ASKING: dict[str, dict[str, object]] = {
    "attention": {"_attn_implementation": "someone/kernel"},
    "version": {"_attn_implementation": "someone/kernel@main:forward"},
    "public": {"attn_implementation": "kernels-community/flash-attn2"},
    "paged": {"_attn_implementation": "paged|someone/kernel"},
    "flash": {"_attn_implementation": "flash_attention_2"},
    "internal": {"_attn_implementation_internal": "someone/kernel"},
    "each": {"_attn_implementation": {"": "someone/kernel"}},
    "experts": {"_experts_implementation": "sonicmoe"},
    "all": {"use_kernels": True, "kernel_config": {"RMSNorm": "someone/kernel:RMSNorm"}},
}


def changed(folder: Path, name: str, changes: dict[str, object], like: Path | None = None) -> Path:
    """The bundled model, or another one, with other words in its config."""
    copy = folder / name
    shutil.copytree(like or Path(loader.__file__).parent / BUNDLED, copy)
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (copy / "generation_config.json").write_text(json.dumps({"custom_generate": "someone/code"}))
    return copy


def test_nobody_asks_for_kernels(tmp_path: Path) -> None:
    """In a process of its own, which has a library of that name."""
    library = tmp_path / "library"
    (library / "kernels").mkdir(parents=True)
    (library / "kernels" / "__init__.py").write_text(KERNELS)
    version = getattr(import_utils, "KERNELS_MIN_VERSION", "0.18.2")
    about = library / f"kernels-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    (about / "RECORD").write_text("kernels/__init__.py,,\n")
    tiny_chat_model(folder=tmp_path / "tiny")
    folders = [
        changed(tmp_path, name, changes, like=tmp_path / "tiny") for name, changes in ASKING.items()
    ]
    asked = tmp_path / "asked"
    with ReadyProcess(
        OPEN, str(library), *map(str, folders), environment={"ASKED": str(asked)}
    ) as run:
        said = run.stdout.read()
        assert run.wait() == 0, run.errors()
    if asked.exists():
        raise AssertionError(asked.read_text())
    told = dict(line.rsplit(" ", 1) for line in said.splitlines())
    assert len(told) == 3 * len(ASKING)
    assert {told[f"{name} {opener}"] for name in ASKING for opener in ("load", "kv_shape")} == {
        "opened"
    }


def test_configs_within_configs_choose_nothing(tmp_path: Path) -> None:
    """A model of images and text has one for each."""
    inner = {"model_type": "llama", "_attn_implementation": "someone/kernel"}
    folder = changed(
        tmp_path, "llava",
        {"model_type": "llava", "text_config": inner, "_attn_implementation": "a/b",
         "vision_config": {"model_type": "clip_vision_model", "attn_implementation": "c/d"}},
    )  # fmt: skip
    config = read_config(folder, "it")
    for each in (config, config.text_config, config.vision_config):
        assert each._attn_implementation is None


@pytest.mark.parametrize("method", ["eetq", "fbgemm_fp8", "metal", "nvfp4"])
def test_weights_that_need_a_hub_are_refused(method: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, "it", {"quantization_config": {"quant_method": method}})
    with pytest.raises(UnsupportedModelError, match=f"^name: weights in the format {method} need"):
        read_config(folder, "name")


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_others_are_made_plain(method: str, tmp_path: Path) -> None:
    inner = {"model_type": "llama", "quantization_config": {"quant_method": method}}
    folder = changed(
        tmp_path, "it", {**inner, "model_type": "llava", "text_config": inner}
    )  # fmt: skip
    config = read_config(folder, "name")
    assert config.quantization_config["dequantize"]
    assert config.text_config.quantization_config["dequantize"]


def test_a_config_that_is_no_file(tmp_path: Path) -> None:
    """Nobody waits for a pipe, and nothing is read without end."""
    folder = tmp_path / "model"
    folder.mkdir()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ModelLoadError, match="it is a pipe, not a file"):
        read_config(folder, "name")
    (folder / "config.json").unlink()
    (folder / "config.json").write_text('{"model_type":')
    with pytest.raises(ModelLoadError, match=r"^name: "):
        read_config(folder, "name")
