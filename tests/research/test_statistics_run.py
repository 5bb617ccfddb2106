"""`python -m research.statistics` on models, against transformers' weights, and as a program."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.core.errors import ConfigError, PromptError
from penstock.evaluate.audit.prompts import split_texts
from penstock.evaluate.result import Result
from penstock.evaluate.tasks import GeneratedTasks
from penstock.generation.prompts import PromptBatch, encode, make_batch
from penstock.models.cache_argument import OUTPUT_NAME
from penstock.models.loader import LoadedModel, load
from penstock.models.model_shape import inspect_model
from penstock.testing.tiny_models import VOCABULARY, tiny_model
from research.figures import measured
from research.figures.chart import draw
from research.statistics import program
from research.statistics.capture import Step, full_attention_steps
from research.statistics.measures import LEVELS
from research.statistics.run import Statistics, measure

LENGTHS = (120, 83)
"""Of two prompts in one batch: the second is padded by 37 tokens."""
STEPS = 6


def prompts(model: PreTrainedModel, lengths: tuple[int, ...]) -> tuple[LoadedModel, PromptBatch]:
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, VOCABULARY, (n,), generator=draw).tolist() for n in LENGTHS]
    ids = [row for row in ids if len(row) in lengths]
    loaded = LoadedModel(model=model, tokenizer=None, name="tiny")
    return loaded, make_batch(loaded, ids, new_tokens=STEPS, pad_token_id=0)


def steps_of(
    model: PreTrainedModel,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    ends: frozenset[int] = frozenset(),
) -> tuple[PromptBatch, list[Step]]:
    loaded, batch = prompts(model, lengths)
    found = full_attention_steps(loaded, batch, new_tokens=STEPS, chunk=50, ends=ends)
    return batch, list(found)


def figures_of(model: PreTrainedModel, **options: Any) -> dict[str, Any]:
    batch, steps = steps_of(model, **options)
    shape = inspect_model(model)
    return measure(Statistics(shape.kv, batch, top=10, new_tokens=STEPS), steps)


class Plain:
    """transformers' own forward pass over prompt and answer, with queries' inputs and weights."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        _, batch = prompts(model, (length,))
        twin: Any = copy.deepcopy(model)
        with torch.no_grad():
            ids = twin.generate(
                batch.input_ids, attention_mask=batch.attention_mask, do_sample=False,
                min_new_tokens=STEPS, max_new_tokens=STEPS, eos_token_id=VOCABULARY + 1,
            )  # fmt: skip
            twin.set_attn_implementation("eager")
            self.out = twin(ids, output_attentions=True, output_hidden_states=True)
        self.length = length

    def shares(self, layer: int, step: int, kv_heads: int) -> Tensor:
        """[kv_heads, tokens]"""
        place = self.length + step
        weights: Tensor = self.out.attentions[layer][0, :, place, : place + 1]
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.reshape(kv_heads, -1, place + 1).mean(dim=1)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_oss"])
def test_mass_and_overlap_are_those_of_the_plain_model(family: str) -> None:
    model = tiny_model(family)
    figures = figures_of(model, lengths=(120,))
    plain, shape = Plain(model, 120), inspect_model(model)
    for number, layer in enumerate(shape.tiered_layers):
        tokens, same, before = [], [], None
        for step in range(STEPS):
            shares = plain.shares(layer, step, shape.kv.num_kv_heads).mean(dim=0)
            held = shares.sort(descending=True).values.cumsum(0)
            tokens.append((int((held < 0.9 - 1e-6).sum()) + 1) / len(shares))
            top = set(shares.topk(10).indices.tolist())
            if before is not None:
                same.append(len(top & before) / 10)
            before = top
        found = figures["mass"]["tokens_together"][number][LEVELS.index(0.9)]
        assert found == pytest.approx(sum(tokens) / STEPS, abs=2e-3)
        assert figures["overlap"][0]["count"] == 10
        found = figures["overlap"][0]["overlap"][number]
        assert found == pytest.approx(sum(same) / len(same), abs=0.021)  # near ties
    assert figures["overlap"][0]["chance"] == pytest.approx(10 / (120 + STEPS))
    assert figures["reuse"]["selected_groups"] == 120 // 4 // 4


def test_padding_is_none_of_the_groups() -> None:
    """A row's share of all groups is of its own: of 83 tokens behind 37 of padding there are 22."""
    model = tiny_model("llama")
    shape = inspect_model(model)
    batch, steps = steps_of(model)
    statistics = Statistics(shape.kv, batch, top=10, new_tokens=STEPS)
    found = measure(statistics, steps)["reuse"]["groups_of_80_percent"]
    for layer, meter in enumerate(statistics._meters):
        shares = []
        for counts, groups in zip(meter.group_counts, ((120 + 6) // 4, 126 // 4 - 9), strict=True):
            held = counts.sort(descending=True).values.cumsum(0).double() / counts.sum()
            shares.append((int((held < 0.8 - 1e-9).sum()) + 1) / groups)
        assert found["of_all"][layer] == pytest.approx(sum(shares) / 2)


def test_inputs_of_adjacent_layers() -> None:
    model = tiny_model("llama")
    figures, plain = figures_of(model, lengths=(120,)), Plain(model, 120)
    assert figures["prediction"]["input_cosine"][0] is None
    hidden = [states[0, 120:].double() for states in plain.out.hidden_states]
    for layer in (1, 2):
        expected = torch.cosine_similarity(hidden[layer - 1], hidden[layer], dim=-1).mean().item()
        assert figures["prediction"]["input_cosine"][layer] == pytest.approx(expected, abs=1e-4)


def test_a_perfect_prediction_finds_everything() -> None:
    """Layers that add nothing hand their input on: the next layer's query is known exactly."""
    model = tiny_model("llama")
    layers: Any = model.base_model.layers
    with torch.no_grad():
        layers[0].self_attn.o_proj.weight.zero_()
        layers[0].mlp.down_proj.weight.zero_()
    found = figures_of(model)["prediction"]
    assert found["cosine"][1] == pytest.approx(1.0, abs=1e-6)
    assert found["input_cosine"][1] == pytest.approx(1.0, abs=1e-6)
    assert found["recall_together"][1] == [1.0, 1.0]
    assert found["recall_per_head"][1] == [1.0, 1.0]
    assert found["recall_together"][2][0] < 1.0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gpt_oss", "phi3"])
def test_rotations_are_found_and_put_back(family: str) -> None:
    model = tiny_model(family)
    _, steps = steps_of(model)
    last = steps[-1]
    assert last.rotation is not None
    keys = last.layers[0].keys
    plain = last.rotation.off(keys)
    assert (last.rotation.on(plain) - keys).abs().max().item() < 1e-4
    assert (plain - keys).abs().max().item() > 0.1


def test_rank_of_all_components_finds_all_keys() -> None:
    low = figures_of(tiny_model("qwen3"))["low_rank"]
    assert low["ranks"] == [16, 32]  # two heads of 16
    for kind in ("after_rope", "before_rope"):
        for layer in range(3):
            assert low[kind]["energy"][layer][-1] == pytest.approx(1.0)
            assert low[kind]["recall_together"][layer][-1] == pytest.approx([1.0, 1.0], abs=0.04)
            assert low[kind]["recall_together"][layer][0][0] < 1.0


def test_without_rotary_embeddings() -> None:
    figures = figures_of(tiny_model("opt"))
    assert "before_rope" not in figures["low_rank"]
    assert "before_rope" not in figures["drift"]
    assert figures["queries"]["cosine_before_rope"] is None
    assert len(figures["queries"]["cosine"]) == 3


def test_a_padded_row_counts_like_a_row_of_its_own() -> None:
    model = tiny_model("qwen3")
    apart = [figures_of(model, lengths=(length,)) for length in LENGTHS]
    together = figures_of(model)
    pairs = [
        ("mass", "tokens_per_head"), ("mass", "mass_together"), ("queries", "cosine_before_rope"),
        ("drift", "after_rope"),
    ]  # fmt: skip
    for part, name in pairs:
        expected = (torch.tensor(apart[0][part][name]) + torch.tensor(apart[1][part][name])) / 2
        assert (torch.tensor(together[part][name]) - expected).abs().max().item() < 2e-3, name
    energies = [torch.tensor(one["low_rank"]["before_rope"]["energy"]) for one in apart]
    found = torch.tensor(together["low_rank"]["before_rope"]["energy"])
    assert (found - (energies[0] + energies[1]) / 2).abs().max().item() < 1e-4


def test_a_given_text_is_followed() -> None:
    """Decoding tokens of a text leaves the keys that reading them all at once leaves."""
    model = tiny_model("llama")
    loaded, whole = prompts(model, (120,))
    text = whole.token_ids[0]
    prompt, following = text[: 120 - STEPS], torch.tensor([text[120 - STEPS :]])
    batch = make_batch(loaded, [prompt], new_tokens=STEPS, pad_token_id=0)
    *_, last = full_attention_steps(
        loaded, batch, new_tokens=STEPS, chunk=50, ends=frozenset(), following=following
    )
    with torch.no_grad():
        out: Any = copy.deepcopy(model)(whole.input_ids, use_cache=True)
    assert last.layers[1].keys.shape[2] == 120
    for number in range(3):
        expected = out[OUTPUT_NAME].layers[number].keys
        assert (last.layers[number].keys - expected).abs().max().item() < 1e-4


def test_texts_are_cut_for_following() -> None:
    loaded = load()
    text = " ".join(["the"] * 40)
    batch, following = split_texts(loaded, [text], new_tokens=8)
    assert following.shape == (1, 8)
    ids = encode(loaded, text)
    assert batch.token_ids[0] + following[0].tolist() == ids
    with pytest.raises(PromptError, match="cannot be followed"):
        split_texts(loaded, [text], new_tokens=len(ids) - 3)


def test_rows_count_until_they_end() -> None:
    model = tiny_model("llama")
    before = model.config._attn_implementation
    _, whole = steps_of(model)
    assert len(whole) == STEPS
    assert model.config._attn_implementation == before
    ids = Plain(model, 120)
    said = ids.out.logits[0, 119:-1].argmax(dim=-1)
    end = frozenset({int(said[3])})
    first = said.tolist().index(int(said[3]))
    _, cut = steps_of(model, ends=end)
    assert [bool(step.live[0]) for step in cut] == [n < first for n in range(len(cut))]
    with pytest.raises(PromptError, match="--past-end"):
        steps_of(model, ends=frozenset(range(VOCABULARY)))


# The program -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = load().tokenizer
    assert tokenizer is not None
    [sample] = GeneratedTasks(tokenizer).draw("multi_value", 0, 1, tokens=700, seed=1)
    path = tmp_path_factory.mktemp("prompts") / "prompt.txt"
    path.write_text(sample.prompt)
    return path


@pytest.mark.slow
def test_a_run(prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "statistics.json"
    program.run(
        ["recall", "--prompt-file", str(prompt_file), "--new-tokens=6",
         "--past-end", "--top=20", f"--out={out}", "--json"]
    )  # fmt: skip
    said = capsys.readouterr()
    assert "rank and drift" in said.err
    *shown, last = said.out.splitlines()
    document = json.loads(last)
    assert document == json.loads(out.read_text())
    assert document["kind"] == "statistics"
    assert document["command"].startswith("python -m research.statistics recall --prompt-file PATH")
    assert str(prompt_file) not in last
    figures = document["figures"]
    assert (figures["prompt_tokens"], figures["steps"]) == ([700], 6)
    assert figures["layers"] == list(range(8))
    # A buffer of one selection holds what the step before selected, and larger ones hold more.
    rates, groups = figures["reuse"]["hit_rate"], figures["overlap"][-1]["overlap"]
    for by_size, overlap in zip(rates, groups, strict=True):
        assert by_size[0] == pytest.approx(overlap)
        assert by_size == sorted(by_size)
    for curve in figures["mass"]["mass_together"]:
        assert curve == sorted(curve)
        assert 0.0 < curve[0] < curve[-1] <= 1.0
    for kind in ("after_rope", "before_rope"):
        assert all(by_rank[-1] == [1.0, 1.0] for by_rank in
                   figures["low_rank"][kind]["recall_together"])  # fmt: skip
    # What calibration measured on other text: docs/methods/kvswap.md.
    cosines = figures["prediction"]["cosine"]
    assert cosines[0] is None
    assert min(cosines[1:]) in (cosines[1], cosines[3])
    assert max(cosines[1:]) in (cosines[4], cosines[5])
    text = "\n".join(shown)
    for source in ("KVSwap", "HillInfer 4.2", "LouisKV 3.2", "DynaKV 2.3", "Locality-aware"):
        assert source in text
    assert f"{groups[3]:.2f}" in text
    result = Result.load(out)
    figure = draw(measured.statistics(result))
    assert all(axes.has_data() for axes in figure.axes)
    reuse = figure.axes[1].get_lines()[-2]
    drawn: Any = reuse.get_ydata()
    assert list(drawn) == [by_size[0] for by_size in rates]


def test_one_step_compares_nothing(prompt_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = program.run(["recall", "--prompt-file", str(prompt_file), "--new-tokens=1"])
    assert result.figures["overlap"][0]["overlap"] == [None] * 8
    assert result.figures["queries"]["cosine"] == [None] * 8
    assert "critical groups of adjacent steps overlap strongly: - of" in capsys.readouterr().out
    draw(measured.statistics(result))


def test_nothing_to_draw() -> None:
    with pytest.raises(ConfigError, match="no layer"):
        draw(measured.statistics(Result.begin("statistics", [], {}, seed=0)))
