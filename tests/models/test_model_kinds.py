"""Model objects whose weights a library packs, adapts or offloads: they are called, never read.

Each runs where its library is installed; docs/how-to/models.md says which versions were tried.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams, load
from penstock.evaluate.tasks.recall import make_sample
from penstock.models import loader
from penstock.models.calibrate import calibrate
from penstock.models.fingerprint import fingerprint
from penstock.models.identity import ModelIdentity

# What these libraries have to say to their own users.
pytestmark = pytest.mark.filterwarnings("ignore")

RECALL = Path(loader.__file__).parent / loader.BUNDLED
NEW_TOKENS = 3
Make = Callable[[Path], Any]


def from_folder(**options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(RECALL, dtype=torch.float32, **options).eval()


def torchao_int8(folder: Path) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    model: Any = load(dtype="float32").model
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def torchao_int4(folder: Path) -> Any:
    """Its default int4 wants a library of kernels (mslk); this one has kernels of torch's own."""
    quantization = pytest.importorskip("torchao.quantization")
    int4 = pytest.importorskip("torchao.prototype.quantization.int4")
    model: Any = load(dtype="float32").model
    quantization.quantize_(model, int4.PrototypeInt4WeightOnlyConfig(group_size=32))
    return model


def bitsandbytes(**options: Any) -> Make:
    def make(folder: Path) -> Any:
        pytest.importorskip("bitsandbytes")
        from transformers import BitsAndBytesConfig

        return from_folder(quantization_config=BitsAndBytesConfig(**options))

    return make


def quanto(weights: str) -> Make:
    def make(folder: Path) -> Any:
        library = pytest.importorskip("optimum.quanto")
        model: Any = load(dtype="float32").model
        library.quantize(model, weights=getattr(library, weights))
        library.freeze(model)
        return model

    return make


def peft_lora(folder: Path) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_alpha=0.2, init_lora_weights=False, task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    )  # fmt: skip
    torch.manual_seed(0)
    return peft.get_peft_model(load(dtype="float32").model, config).eval()


def disk_offload(folder: Path) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.disk_offload(load(dtype="float32").model, folder)


def device_map(folder: Path) -> Any:
    pytest.importorskip("accelerate")
    places = dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(8)}
    return from_folder(device_map=places, offload_folder=folder)


KINDS: dict[str, Make] = {
    "torchao-int8": torchao_int8,
    "torchao-int4": torchao_int4,
    "bitsandbytes-nf4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes-nf4-nested": bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes-int8": bitsandbytes(load_in_8bit=True),
    "quanto-int8": quanto("qint8"),
    "quanto-int4": quanto("qint4"),
    "peft-lora": peft_lora,
    "accelerate-disk-offload": disk_offload,
    "accelerate-device-map": device_map,
}


@pytest.fixture(scope="module")
def ids() -> list[int]:
    """A document with facts, and a question for one of them."""
    tokenizer = load().tokenizer
    assert tokenizer is not None
    sample = make_sample("multi_query", 150, random.Random(3), tokenizer.get_vocab())
    found: list[int] = tokenizer(sample.prompt)["input_ids"]
    return found


def plain_answer(model: Any, ids: list[int]) -> list[int]:
    """As transformers answers with a cache of its own."""
    with torch.no_grad():
        tokens = model.generate(
            input_ids=torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    answer: list[int] = tokens[0, len(ids) :].tolist()
    return answer


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_the_plain_model(kind: str, ids: list[int], tmp_path: Path) -> None:
    model = KINDS[kind](tmp_path)
    named, identity = fingerprint(model), ModelIdentity.of(model, None)
    expected = plain_answer(model, ids)
    adapter = calibrate(model, [torch.tensor(ids[:60])], rank=16)
    assert adapter.fingerprint == fingerprint(model) == named, "running it changes nothing"
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    memory = "9/10" if kind == "peft-lora" else "1/2"  # predictions need copies of its projections
    for exact in (False, True):
        [output] = LLM(model, memory=memory, store="memory", exact=exact).generate(ids, params)
        assert output.token_ids == expected
        assert output.run.stats.decode.read_bytes_per_token > 0
    assert ModelIdentity.of(model, None) == identity
    assert plain_answer(model, ids) == expected
