"""Models with weights in 8 and 4 bits: loaded, kept, found again, run, and told apart."""

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from penstock import LLM, KVSwap, SamplingParams, TieredCache, load
from penstock.core.errors import ConfigError, DocumentMismatchError
from penstock.models.cache_argument import cache_argument
from penstock.models.calibration_text import code, dialogue, prose
from penstock.models.fingerprint import fingerprint
from penstock.models.identity import ModelIdentity, require_same, weights_of
from penstock.models.model_config import read_config
from penstock.models.packed import calibration, kept
from penstock.models.packed.calibration import calibration_pieces
from penstock.models.packed.form import Form
from penstock.models.packed.kept import kept_model
from penstock.models.packed.modules import QuickNorm, packed_modules, quicken_norms
from penstock.models.packed.sources import PackedSource
from penstock.testing.tiny_chat import tiny_chat_model

SIZES: Any = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "head_dim": 32, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = {
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "turned experts": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
IDS = torch.arange(3, 43)[None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept, "weights_cache", lambda: tmp_path / "cache")
    shorten_texts(monkeypatch)
    return tmp_path / "cache"


def shorten_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are short, and there is no text behind what is cut into them."""
    monkeypatch.setattr(calibration, "_PIECE_TOKENS", 64)
    for text in (prose, code, dialogue):
        monkeypatch.setattr(calibration, text.__name__, partial(str, text()[:1000]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "chat"
    tiny_chat_model(folder=folder)
    return folder


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the folder is kept in either form."""
    place = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "weights_cache", lambda: place)
        shorten_texts(patch)
        for weights in ("int8", "int4"):
            load(folder, weights=weights)
    return place


@pytest.fixture
def was_packed(packed: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder was packed before."""
    monkeypatch.setattr(kept, "weights_cache", lambda: packed)


class Display:
    """A progress display, which is locked and cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.seen: list[tuple[str, int, int]] = []

    def show(self, what: str, done: int, total: int) -> None:
        with self.lock:
            self.seen.append((what, done, total))


def test_packing_is_shown_as_it_goes_on(folder: Path) -> None:
    display = Display()
    load(folder, weights="int8", on_bytes=display.show)
    packing = [done for what, done, total in display.seen if what.startswith("packing")]
    assert len(packing) > 2
    assert 0 < packing[0] < packing[-1]
    assert packing == sorted(packing)


def source_of(folder: Path, bits: int) -> PackedSource:
    return PackedSource(
        folder=folder, config=read_config(folder, "tiny"), dtype="auto", bits=bits, own_code=False,
        on_bytes=lambda what, done, total: None,
    )  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_kept_is_what_was_made(config: PreTrainedConfig, bits: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain.save_pretrained(tmp_path / "plain")
    source = source_of(tmp_path / "plain", bits)
    made = source.make()
    written, said = kept_model(source)
    found, silent = kept_model(source)
    assert "int" in said
    assert silent == ""
    layers = packed_modules(made)
    assert {each.forms[name].bits for each in layers.values() for name in each.forms} == {8, bits}
    for ids in (IDS, IDS[:, :3]):  # through plain tiles, and through packed products
        logits, packed = plain(ids).logits, made(ids).logits
        assert torch.equal(packed, written(ids).logits)
        assert torch.equal(packed, found(ids).logits)
        assert (packed - logits).norm() < (0.04 if bits == 8 else 0.4) * logits.norm()
    size = sum(each.nbytes for each in found.parameters())
    assert size < (0.3 if bits == 8 else 0.25) * sum(each.nbytes for each in plain.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "is_quick"),
    [(FAMILIES["tied"], True), (FAMILIES["experts"], True), (Gemma2Config(**SIZES), False)],
    ids=["llama", "norms of heads", "another formula"],
)
def test_norms_like_llamas_are_one_call_for_a_few_tokens(
    config: PreTrainedConfig, is_quick: bool, dtype: torch.dtype
) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    own = {each: type(each) for each in model.modules() if type(each).__name__.endswith("Norm")}
    with torch.no_grad():
        before = model(IDS).logits.float()
        quicken_norms(model)
        after = model(IDS).logits.float()
    assert own
    assert {isinstance(each, QuickNorm) for each in own} == {is_quick}
    step = torch.finfo(dtype).eps
    assert (after - before).norm() < 8 * step * before.norm()
    for norm, kind in own.items():
        weight: Any = norm.weight
        many = torch.randn(600, len(weight), dtype=dtype)
        few, whole = many[:3], many.repeat(8, 1)
        assert torch.equal(norm(few), kind.forward(norm, few))  # gradients are wanted
        with torch.no_grad():
            assert torch.equal(norm(whole), kind.forward(norm, whole))
            torch.testing.assert_close(norm(few), kind.forward(norm, few), rtol=2 * step, atol=step)
            assert norm(few.double()).dtype == kind.forward(norm, few.double()).dtype


def test_a_folder_is_packed_once(folder: Path, cache: Path) -> None:
    first = load(folder, weights="int8")
    assert "packed to int8" in first.notices[0]
    assert load(folder, weights="int8").notices == ()
    assert first.model.name_or_path == str(folder)
    known = fingerprint(first.model)
    [place] = (each for each in cache.iterdir() if each.is_dir())
    with (place / "model.safetensors").open("r+b") as file:
        file.seek(-9, 2)
        file.write(b"\0\xff\x7f")
    again = load(folder, weights="int8")
    assert "packed to int8" in again.notices[0], "a damaged file was used"
    assert fingerprint(again.model) == known
    assert known != fingerprint(load(folder).model)


@torch.no_grad()
def test_four_bits_are_chosen_by_text(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load(folder)
    source = source_of(folder, 4)
    by_text = replace(source, tokenizer=plain.tokenizer)
    assert source.key != by_text.key
    assert replace(source_of(folder, 8), tokenizer=plain.tokenizer).key == source_of(folder, 8).key
    pieces = calibration_pieces(plain.tokenizer, plain.model.config)
    assert len(pieces) > 2
    assert calibration_pieces(None, plain.model.config) == []
    monkeypatch.setattr(calibration, "LOSS_BOUND", 0.0)  # as many matrices as there is room for
    made = by_text.make()
    assert fingerprint(made) != fingerprint(source.make())
    layers: dict[str, Any] = {
        path: each for path, each in packed_modules(made).items() if "layers" in path
    }
    said = made.config.quantization_config.forms
    assert {path: list(layers[path].forms["weight"]) for path in said} == said
    eight = {path for path, form in said.items() if form[0] == 8}
    assert eight
    fours = sum(
        each.out_features * Form(4, 32).row_bytes(each.in_features, made.dtype)
        for path, each in layers.items() if path in said
    )  # fmt: skip
    held = sum(layers[path].weight.nbytes for path in said)
    assert fours < held <= (1 + calibration.MOST_MORE_BYTES) * fours
    ids = torch.stack(pieces[-2:])
    logits = plain.model(ids).logits
    assert calibration.divergence(logits, logits) == pytest.approx(0, abs=1e-6)
    loss = calibration.divergence(logits, made(ids).logits)
    assert 0 < loss < calibration.divergence(logits, source.make()(ids).logits)


def test_without_room_to_keep_it_works(folder: Path, cache: Path) -> None:
    cache.write_text("no folder")
    loaded = load(folder, weights="int4")
    assert "could not be kept" in loaded.notices[0]
    assert packed_modules(loaded.model)


@pytest.mark.usefixtures("was_packed")
def test_answers_are_those_of_the_packed_model(folder: Path) -> None:
    llm = LLM(folder, quantization="int4", policy="kvswap", memory=1.0, store="memory")
    params = SamplingParams(temperature=0, max_tokens=8)
    [answer] = llm.generate([{"prompt_token_ids": list(range(3, 60))}], params, use_tqdm=False)
    out: Any = llm.model.generate(
        torch.arange(3, 60)[None], max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert list(answer.outputs[0].token_ids) == out[0, 57:].tolist()
    with pytest.raises(ConfigError, match="int4 weights"):
        LLM(llm._loaded, quantization="int8")


def test_what_cannot_be(folder: Path) -> None:
    with pytest.raises(ConfigError, match="not one of int8, int4"):
        load(folder, weights="int5")


@pytest.mark.usefixtures("was_packed")
def test_an_identity_names_the_bits(folder: Path) -> None:
    identities = {}
    for weights in (None, "int8", "int4"):
        loaded = load(folder, weights=weights)
        of = ModelIdentity.of(loaded.model, None)
        identities[weights] = of.stored(None, group_tokens=4)
        assert weights_of(identities[weights]) == weights
    for there, here, said in (
        ("int4", "int8", r"weights \(int4 there, int8 here\)"),
        (None, "int4", r"weights \(plain weights there, int4 here\)"),
    ):
        with pytest.raises(DocumentMismatchError, match=said):
            require_same(identities[there], identities[here], "a text")


@torch.no_grad()
@pytest.mark.usefixtures("was_packed")
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_predictions_are_made_by_the_packed_layer(folder: Path, weights: str) -> None:
    model = load(folder, weights=weights).model
    policy = KVSwap(window_tokens=8, selected_tokens=16, reuse_tokens=16, rank=16, index_bits=8)
    with TieredCache(model, policy, store="memory", max_tokens=200) as cache:
        assert cache.plan.predictor_bytes == 0, "no copies in 8 bits of what is packed"
        model(IDS, **cache_argument(model, cache))
        for token in (5, 6, 7):
            model(torch.tensor([[token]]), **cache_argument(model, cache))
        assert cache._hooks is not None
        projection = cache._hooks._projection
        assert projection._ways[1] == "direct"
        hidden = torch.randn(1, 1, 64)
        kwargs = {"position_embeddings": model.model.rotary_emb(hidden, torch.tensor([[43]]))}
        predicted = projection.project(1, hidden, kwargs)
        assert predicted is not None
        probed = projection.probe(1, hidden, kwargs)[:, :, -1]
        torch.testing.assert_close(predicted, probed, rtol=1e-4, atol=1e-4)
