"""Offloaded and packed weights: models run, and are told apart by what they compute with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from penstock import Document, KVSwap, SamplingParams, TieredCache
from penstock.core.errors import DocumentMismatchError, UnsupportedModelError
from penstock.methods import FlexGen
from penstock.models.cache_argument import cache_argument
from penstock.models.fingerprint import fingerprint
from penstock.models.identity import ModelIdentity
from penstock.models.weight_access import is_plain, model_device
from penstock.testing.tiny_models import tiny_model

TOKENS = list(range(10, 80))
PARTS = {
    "embeddings": ["model.embed_tokens"],
    "a layer": ["model.layers.1"],
    "all": ["model.embed_tokens", "model.layers", "model.norm", "lm_head"],
}


def offloaded(model: PreTrainedModel, part: str, folder: Path) -> PreTrainedModel:
    """The model with some of it on the disk, by accelerate; the rest in memory."""
    accelerate = pytest.importorskip("accelerate")
    names = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"]
    names += [f"model.layers.{i}" for i in range(3)]
    places = {
        name: "disk" if any(name.startswith(each) for each in PARTS[part]) else "cpu"
        for name in names
    }
    dispatched: PreTrainedModel = accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=str(folder)
    )
    assert any(weight.device.type == "meta" for weight in dispatched.parameters())
    return dispatched


def generate(model: PreTrainedModel, cache: Any) -> Tensor:
    ids = torch.tensor([TOKENS])
    out: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), **cache_argument(model, cache), max_new_tokens=6,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out


# Older releases say so where the first parameter has been offloaded.
@pytest.mark.filterwarnings("ignore:You are calling .generate")
@pytest.mark.parametrize(("family", "part"), [*(("qwen3", part) for part in PARTS), ("opt", "")])
def test_an_offloaded_model_runs_with_the_default_policy(
    family: str, part: str, tmp_path: Path
) -> None:
    plain = tiny_model(family)
    expected = generate(plain, DynamicCache(config=plain.config))
    if family == "opt":
        accelerate = pytest.importorskip("accelerate")
        model = accelerate.disk_offload(tiny_model(family), tmp_path, execution_device="cpu")
    else:
        model = offloaded(tiny_model(family), part, tmp_path)
    before, identity = fingerprint(plain), ModelIdentity.of(plain, None)
    assert fingerprint(model) == before
    assert ModelIdentity.of(model, None) == identity
    for policy in ("kvswap", KVSwap(window_tokens=8, selected_tokens=10**6)):
        with TieredCache(model, policy, store="memory", max_tokens=100) as cache:
            assert torch.equal(generate(model, cache), expected)
    assert model_device(model) == torch.device("cpu")
    assert ModelIdentity.of(model, None) == identity, "running it changes nothing"


def test_a_document_of_another_offloaded_model_is_refused(tmp_path: Path) -> None:
    models = []
    for seed in (0, 9):
        model: Any = tiny_model("llama")
        other: Any = tiny_model("llama", seed=seed)
        model.model.layers[1].load_state_dict(other.model.layers[1].state_dict())
        models.append(offloaded(model, "a layer", tmp_path / str(seed)))
    first, second = models
    assert fingerprint(first) != fingerprint(second)
    path, params = tmp_path / "document", SamplingParams(temperature=0, max_tokens=4)
    policy = FlexGen(group_tokens=8)
    Document.create(first, TOKENS, path, policy=policy, memory="100KiB").close()
    with pytest.raises(DocumentMismatchError, match="weights"):
        Document.open(second, path)
    with Document.open(first, path) as document:
        assert len(document.ask([[5, 6, 7]], params, exact=True)[0].token_ids) == 4


def test_weights_that_nothing_brings_are_named() -> None:
    model: Any = tiny_model("llama")
    model.model.layers[2].mlp.to("meta")
    for read in (fingerprint, lambda each: ModelIdentity.of(each, None)):
        with pytest.raises(UnsupportedModelError, match=r"layers\.2\.mlp\.\w+_proj\.weight .*meta"):
            read(model)
    model.to("meta")
    with pytest.raises(UnsupportedModelError, match="embeddings of LlamaForCausalLM"):
        TieredCache(model, "full", store="memory", max_tokens=100)


class Packed(torch.Tensor):
    """A weight as quantisers keep it: two tensors, unpacked where it is used."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> "Packed":
        made: Packed = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    def unpack(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "linear":  # `nn.functional.linear` is another one under --other-sums
            x, weight, *rest = args
            return func(x, weight.unpack(), *rest, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} on a packed weight")


def packed(family: str, seed: int = 0) -> PreTrainedModel:
    """A model whose linear layers' weights are packed, under the class nn.Linear."""
    model = tiny_model(family, seed)
    for module in model.model.layers.modules():
        if type(module) is nn.Linear:
            weight = module.weight.detach()
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            codes = (weight / scale).round().to(torch.int8)
            module.weight = nn.Parameter(Packed(codes, scale), requires_grad=False)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_packed_weights_are_called_and_told_apart(family: str) -> None:
    model = packed(family)
    assert not is_plain(model.model.layers[0].self_attn.q_proj)
    expected = generate(model, DynamicCache(config=model.config))
    policy = KVSwap(window_tokens=8, selected_tokens=10**6)
    with TieredCache(model, policy, store="memory", max_tokens=100) as cache:
        assert torch.equal(generate(model, cache), expected)
    assert fingerprint(model) == fingerprint(packed(family))
    assert fingerprint(model) != fingerprint(packed(family, seed=1))
    one = ModelIdentity.of(model, None)
    model.model.layers[1].mlp.up_proj.weight.codes[3, 4] += 1
    assert ModelIdentity.of(model, None).weights != one.weights


def test_matrices_in_buffers_count() -> None:
    """Quantisers keep them there too."""
    model = tiny_model("llama")
    plain = fingerprint(model)
    model.model.layers[0].register_buffer("qweight", torch.ones(4, 4, dtype=torch.int32))
    with_buffer = fingerprint(model)
    model.model.layers[0].qweight[2, 1] = 7
    assert len({plain, with_buffer, fingerprint(model)}) == 3


def test_what_is_no_tensor_is_named() -> None:
    class Scaled(nn.Identity):
        def get_extra_state(self) -> dict[str, int]:
            return {"scale": 3}

    model: Any = tiny_model("llama")
    model.model.norm = Scaled()
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\._extra_state .*dict"):
        ModelIdentity.of(model, None)


def test_a_module_with_more_than_its_weights_is_called() -> None:
    linear = nn.Linear(4, 4)
    assert is_plain(linear, "weight", "bias")
    handle = linear.register_forward_hook(lambda *_: None)
    assert not is_plain(linear)
    handle.remove()
    assert is_plain(linear)
    linear.__dict__["forward"] = nn.Identity()
    assert not is_plain(linear)
    assert not is_plain(nn.Linear(4, 4, device="meta"))


class FourBit(nn.Linear):
    """A layer as bitsandbytes has them: its scales lie beside the weight."""

    def _save_to_state_dict(self, *_: Any, **__: Any) -> None:
        raise AssertionError("it would be damaged")


def test_layers_that_a_state_dict_would_damage_are_read_otherwise() -> None:
    def of(scale: float) -> tuple[str, ModelIdentity]:
        model: Any = tiny_model("llama")
        layer = FourBit(8, 4, bias=True)
        layer.weight = nn.Parameter(torch.ones(16, 1, dtype=torch.uint8), requires_grad=False)
        nn.init.zeros_(layer.bias)
        state: Any = layer.weight
        state.quant_state = SimpleNamespace(absmax=torch.full((8,), scale), nested=False)
        model.model.layers[1].mlp.down_proj = layer
        return fingerprint(model), ModelIdentity.of(model, None)

    (name, identity), (other_name, other) = of(1.0), of(2.0)
    assert (name, identity) == of(1.0)
    assert name != other_name
    assert identity != other
