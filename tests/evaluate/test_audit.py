"""The audit's figures against hand-made cases and transformers' own attention weights."""

import copy
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.core.errors import ConfigError, PromptError
from penstock.evaluate.accuracy_settings import parse_setting, parse_settings
from penstock.evaluate.audit import program
from penstock.evaluate.audit.fidelity import attention_shares, captured_mass, recall_of_top
from penstock.evaluate.audit.program import audit
from penstock.evaluate.audit.reference import Reference, make_reference
from penstock.evaluate.audit.run import Fidelity, follow
from penstock.evaluate.result import Result
from penstock.evaluate.tasks import GeneratedTasks
from penstock.generation.prompts import PromptBatch, make_batch
from penstock.kernels.divergence import kl_divergence
from penstock.methods.baselines.streaming_llm import StreamingLLM
from penstock.models.loader import LoadedModel, load
from penstock.models.model_shape import inspect_model
from penstock.testing.tiny_models import VOCABULARY, tiny_model
from research.figures import measured
from research.figures.chart import draw

LENGTHS = (120, 83)
"""Of two prompts in one batch: the second is padded by 37 tokens."""
STEPS = 7


# By eye ----------------------------------------------------------------------------------------


def test_shares_mass_and_recall_by_eye() -> None:
    # Head 0 sees weights 4, 2, 1, 1; head 1 does not care. One KV head serves both.
    keys = torch.tensor([4.0, 2.0, 1.0, 1.0]).log().view(1, 1, 4, 1)
    query = torch.tensor([1.0, 0.0]).view(1, 2, 1)
    shares = attention_shares(query, keys, None, scaling=1.0)
    assert shares.flatten().tolist() == pytest.approx([0.375, 0.25, 0.1875, 0.1875])
    attended = torch.tensor([True, False, False, True]).view(1, 1, 4)
    visible = torch.ones(1, 4, dtype=torch.bool)
    assert captured_mass(shares, attended).tolist() == pytest.approx([0.5625])
    assert recall_of_top(shares, attended, visible, 1).tolist() == [1.0]
    assert recall_of_top(shares, attended, visible, 2).tolist() == [0.5]
    assert recall_of_top(shares, attended, visible, 99).tolist() == [0.5]


def test_padding_has_no_share_and_is_no_top_token() -> None:
    keys = torch.tensor([9.0, 2.0, 1.0, 1.0]).log().view(1, 1, 4, 1)
    visible = torch.tensor([[False, True, True, True]])
    shares = attention_shares(torch.ones(1, 1, 1), keys, visible, scaling=1.0)
    assert shares.flatten().tolist() == pytest.approx([0.0, 0.5, 0.25, 0.25])
    attended = torch.tensor([False, True, False, False]).view(1, 1, 4)
    assert captured_mass(shares, attended).item() == pytest.approx(0.5)
    assert recall_of_top(shares, attended, visible, 4).item() == pytest.approx(1 / 3)


def test_heads_that_select_for_themselves() -> None:
    shares = torch.tensor([[[0.7, 0.2, 0.1, 0.0], [0.0, 0.1, 0.2, 0.7]]])
    visible = torch.ones(1, 4, dtype=torch.bool)
    own = torch.tensor([[[True, True, False, False], [True, True, False, False]]])
    assert captured_mass(shares, own).item() == pytest.approx((0.9 + 0.1) / 2)
    # The first head has both of its top tokens, the second neither.
    assert recall_of_top(shares, own, visible, 2).item() == pytest.approx(0.5)
    # All heads alike: the layer's top tokens are 0 and 3.
    assert recall_of_top(shares, own[:, :1], visible, 2).item() == pytest.approx(0.5)


def test_divergence_by_eye() -> None:
    full = torch.tensor([[0.5, 0.5, 0.0]]).log()
    other = torch.tensor([[0.75, 0.125, 0.125]]).log()
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.125)
    assert kl_divergence(full, other).item() == pytest.approx(expected, rel=1e-6)
    assert kl_divergence(full, full).item() == 0.0


# Against transformers --------------------------------------------------------------------------


def prompts(model: PreTrainedModel) -> tuple[LoadedModel, PromptBatch]:
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, VOCABULARY, (n,), generator=draw).tolist() for n in LENGTHS]
    loaded = LoadedModel(model=model, tokenizer=None, name="tiny")
    return loaded, make_batch(loaded, ids, new_tokens=STEPS, pad_token_id=0)


@functools.cache
def referred(family: str) -> tuple[PreTrainedModel, Reference]:
    """A model that stays as it is."""
    model = tiny_model(family)
    return model, refer(model)


def refer(model: PreTrainedModel, **options: Any) -> Reference:
    loaded, batch = prompts(model)
    chosen = {"new_tokens": STEPS, "chunk": 50, "ends": frozenset(), **options}
    return make_reference(loaded, batch, **chosen)


def eager(model: PreTrainedModel, reference: Reference) -> Any:
    """One plain forward pass over prompts and answers, with the weights of attention."""
    twin: Any = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    mask = reference.mask
    with torch.no_grad():
        return twin(
            torch.cat([reference.prompt.input_ids, reference.tokens], dim=1), attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp_min(0), output_attentions=True,
        )  # fmt: skip


def weights_of(out: Any, layer: int, step: int, kv_heads: int) -> Tensor:
    """transformers' own attention of one step, as `attention_shares` has it."""
    place = max(LENGTHS) + step
    weights: Tensor = out.attentions[layer][:, :, place, : place + 1]
    weights = weights / weights.sum(dim=-1, keepdim=True)  # learned sinks take their part
    batch, heads, tokens = weights.shape
    return weights.reshape(batch, kv_heads, heads // kv_heads, tokens).mean(dim=2)


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "gpt_oss"])
def test_the_reference_is_the_plain_model(family: str) -> None:
    model = tiny_model(family)
    before = model.config._attn_implementation
    reference = refer(model)
    assert model.config._attn_implementation == before
    assert reference.num_steps == STEPS
    out = eager(model, reference)
    shape = inspect_model(model)
    first = max(LENGTHS)
    for step in range(STEPS):
        plain = torch.log_softmax(out.logits[:, first + step].float(), dim=-1)
        assert (plain - reference.log_probs[step]).abs().max().item() < 1e-4
        said = out.logits[:, first + step - 1].argmax(dim=-1)
        assert torch.equal(said, reference.tokens[:, step]), "greedy"
        assert len(reference.shares[step]) == shape.kv.num_layers
        for number, layer in enumerate(shape.tiered_layers):
            expected = weights_of(out, layer, step, shape.kv.num_kv_heads)
            assert (expected - reference.shares[step][number]).abs().max().item() < 1e-5


FAMILIES = ("llama", "opt", "gemma2", "gpt_oss")
EVERYTHING = (
    "full", "flexgen:group_tokens=8", "kvswap:selected_tokens=9999,window_tokens=8",
    "quest:selected_tokens=9999,window_tokens=8,group_tokens=8", "kvswap@1/1",
    "streaming_llm:selected_tokens=9999", "h2o:selected_tokens=9999",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "text"),
    [(FAMILIES[number % 4], text) for number, text in enumerate(EVERYTHING)],
)
def test_a_budget_of_everything_misses_nothing(family: str, text: str) -> None:
    model, reference = referred(family)
    whole = follow(model, parse_setting(text), reference, top=16, store="memory")
    layers = inspect_model(model).kv.num_layers
    assert whole.mass == pytest.approx([1.0] * layers, abs=1e-5)
    assert whole.recall == [1.0] * layers
    assert (whole.mean_mass, whole.mean_recall) == pytest.approx((1.0, 1.0), abs=1e-5)
    # Every token of both rows, the mean over them and the steps.
    assert whole.tokens == pytest.approx([sum(LENGTHS) / 2 + (STEPS + 1) / 2] * layers)
    assert max(whole.kl) < 1e-8
    assert whole.same == [1.0] * STEPS
    assert whole.same_token == 1.0
    assert whole.mean_kl == pytest.approx(0.0, abs=1e-8)


def test_streaming_llm_has_sinks_and_newest_tokens_only() -> None:
    """Its attended set is known, so that transformers' own weights say what it captures."""
    model = tiny_model("llama")
    reference = refer(model)
    sinks, window, selected = 4, 8, 16
    policy = StreamingLLM(selected_tokens=selected, window_tokens=window, sink_tokens=sinks)
    setting = parse_setting("streaming_llm:selected_tokens=16,window_tokens=8,sink_tokens=4")
    assert setting.policy == policy
    found = follow(model, setting, reference, top=10, store="memory")
    out = eager(model, reference)
    for layer in range(3):
        masses, recalls = [], []
        for step in range(STEPS):
            weights = weights_of(out, layer, step, 2).mean(dim=1)
            for row, length in enumerate(LENGTHS):
                start, end = max(LENGTHS) - length, max(LENGTHS) + step + 1
                newest = range(end - selected - window - 1, end)
                kept = {*range(start, start + sinks), *newest}
                masses.append(sum(weights[row, place].item() for place in kept))
                top = weights[row].topk(10).indices.tolist()
                recalls.append(len(kept.intersection(top)) / 10)
        assert found.mass[layer] == pytest.approx(sum(masses) / len(masses), abs=1e-5)
        assert found.recall[layer] == pytest.approx(sum(recalls) / len(recalls))
        assert 0.05 < found.mass[layer] < 0.95
    assert found.tokens == [sinks + selected + window + 1] * 3
    assert found.mean_kl is not None
    assert found.mean_kl > 1e-3


def test_divergence_is_that_of_the_masked_model() -> None:
    """One plain forward pass under a mask that hides what streaming_llm forgets says the same."""
    model = tiny_model("llama")
    loaded, batch = prompts(model)
    setting = parse_setting("streaming_llm:selected_tokens=16,window_tokens=8,sink_tokens=4")
    reference, [found] = audit(
        loaded, batch, [setting], new_tokens=STEPS, past_end=True, store="memory"
    )
    first, total = max(LENGTHS), max(LENGTHS) + STEPS
    seen = torch.ones(len(LENGTHS), total, total, dtype=torch.bool).tril()
    for row, length in enumerate(LENGTHS):
        start = first - length
        seen[row, :, :start] = False
        seen[row, :start, 0] = True  # padding sees something, so that no row is empty
        for step in range(STEPS):
            seen[row, first + step, start + 4 : first + step - 16 - 8] = False
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    twin: Any = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        logits = twin(
            torch.cat([batch.input_ids, reference.tokens], dim=1),
            attention_mask=additive[:, None],
            position_ids=(reference.mask.cumsum(dim=1) - 1).clamp_min(0),
        ).logits[:, first:]  # fmt: skip
    plain = eager(model, reference).logits[:, first:]
    left, right = (torch.log_softmax(each.double(), dim=-1) for each in (plain, logits))
    expected = (left.exp() * (left - right)).sum(dim=-1).mean(dim=0)
    assert found.kl == pytest.approx(expected.tolist(), rel=1e-2, abs=1e-5)
    same = (plain.argmax(dim=-1) == logits.argmax(dim=-1)).double().mean(dim=0)
    assert found.same == same.tolist()
    assert found.mean_kl is not None
    assert found.mean_kl == pytest.approx(expected.mean().item(), rel=1e-2)
    assert found.mean_kl > 0.01


def test_a_padded_row_counts_like_a_row_of_its_own() -> None:
    model = tiny_model("qwen3")
    loaded, batch = prompts(model)
    setting = parse_setting("quest:selected_tokens=16,window_tokens=8,group_tokens=4")
    # The padding is a multiple of a group, so that groups begin at the same tokens.
    rows = [batch.token_ids[0], batch.token_ids[1][:80]]

    def figures(ids: list[list[int]]) -> list[list[float]]:
        batch = make_batch(loaded, ids, new_tokens=STEPS, pad_token_id=0)
        _, [found] = audit(
            loaded, batch, [setting], new_tokens=STEPS, past_end=True, top=10, store="memory"
        )
        return [found.mass, found.recall, found.tokens]

    apart = [torch.tensor(figures(rows[i : i + 1])) for i in range(2)]
    together = torch.tensor(figures(rows))
    assert (apart[0] - apart[1]).abs().max().item() > 1e-3
    assert (together - (apart[0] + apart[1]) / 2).abs().max().item() < 1e-4


def test_rows_count_until_they_end() -> None:
    model = tiny_model("llama")
    whole = refer(model)
    end = int(whole.tokens[0, 3])
    first = [row.index(end) if end in row else STEPS for row in whole.tokens.tolist()]
    cut = refer(model, ends=frozenset({end}))
    assert cut.num_steps == max(first)
    for row, count in enumerate(first):
        assert cut.live[row].tolist() == [step < count for step in range(cut.num_steps)]
    setting = parse_setting("streaming_llm:selected_tokens=16,window_tokens=8")
    long, short = (follow(model, setting, r, top=10, store="memory") for r in (whole, cut))
    assert short.mean_kl != pytest.approx(long.mean_kl)
    at_once = frozenset(whole.tokens[:, 0].tolist())
    with pytest.raises(PromptError, match="--past-end"):
        refer(model, ends=at_once)


# The program -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = load().tokenizer
    assert tokenizer is not None
    [sample] = GeneratedTasks(tokenizer).draw("multi_value", 0, 1, tokens=400, seed=1)
    path = tmp_path_factory.mktemp("prompts") / "prompt.txt"
    path.write_text(sample.prompt)
    return path


def test_a_run(prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "audit.json"
    policies = "full,kvswap@1/2:selected_tokens=64,quest@1/2:selected_tokens=64,kvswap@1/999"
    program.run(
        ["recall", "--prompt-file", str(prompt_file), f"--policies={policies}", "--disk=memory",
         "--max-new-tokens=5", "--top=20", f"--out={out}", "--json"]
    )  # fmt: skip
    said = capsys.readouterr()
    assert "reads the prompt" in said.err
    *shown, last = said.out.splitlines()
    document = json.loads(last)
    assert document == json.loads(out.read_text())
    assert document["kind"] == "audit"
    assert str(prompt_file) not in last
    figures = document["figures"]
    assert figures["prompt_tokens"] == [400]
    assert figures["steps"] == figures["counted_steps"] == 5
    assert figures["layers"] == list(range(8))
    full, kvswap, quest, refused = figures["policies"]
    assert full["mean_mass"] == pytest.approx(1.0, abs=1e-5)
    assert full["recall"] == [1.0] * 8
    assert full["mean_kl"] < 1e-4
    for found in (kvswap, quest):
        assert len(found["mass"]) == len(found["recall"]) == len(found["tokens"]) == 8
        assert all(0.0 < mass < 1.0 for mass in found["mass"])
        assert found["ledger_bytes"] < full["ledger_bytes"] / 1.9
        assert found["full_cache_bytes"] == full["full_cache_bytes"]
    assert (kvswap["per_head"], quest["per_head"]) == (False, True)
    assert "too little" in refused["refused"]
    table = "\n".join(shown)
    assert f"{kvswap['mean_mass']:.3f}" in table
    assert f"{min(quest['mass']):.3f}" in table
    assert "selects per KV head, and its recall is per head: quest" in table
    figure = draw(measured.audit(Result.load(out)))
    [axes] = figure.axes
    drawn: dict[str, Any] = {str(line.get_label()): line.get_ydata() for line in axes.get_lines()}
    assert len(drawn) == 3
    assert list(drawn[next(x for x in drawn if x.startswith("kvswap"))]) == kvswap["mass"]


def test_layers_with_a_window_are_named() -> None:
    model = tiny_model("gpt_oss")
    loaded, batch = prompts(model)
    settings = parse_settings(["full,streaming_llm:selected_tokens=16"])
    _, audits = audit(loaded, batch, settings, new_tokens=2, past_end=True, store="memory")
    result = Result.begin("audit", [], {"model": "x", "top": 64}, seed=0)
    result.figures = {
        "layers": [0, 2], "left_out_layers": [1], "prompt_tokens": list(LENGTHS), "steps": 2,
    }  # fmt: skip
    text = program.report(result, audits)
    assert "window of their own, always whole: 1" in text
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["0", "2"]


def test_nothing_to_draw() -> None:
    result = Result.begin("audit", [], {}, seed=0)
    result.figures = {"policies": [vars(Fidelity(setting="a", refused="no"))], "layers": [0]}
    with pytest.raises(ConfigError, match="no policy"):
        draw(measured.audit(result))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-file=missing.txt"], "cannot read prompt file missing.txt"),
        (["--prompt-file={empty}"], "the prompt is empty"),
        (["--prompt-file={empty}", "--chat"], "no chat template"),
        (["--prompt-file={good}", "--policies=magic@1/2"], "no policy 'magic'"),
        (["--prompt-file={good}", "--max-new-tokens=0"], "at least 1"),
        (["--prompt-file={good}", "--out={folder}"], "is a folder"),
        (["--prompt-file={good}", "--max-new-tokens=99999999"], "positions"),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path, prompt_file: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    paths = {"empty": empty, "good": prompt_file, "folder": tmp_path}
    with pytest.raises(ConfigError, match=message):
        program.run(["recall", *(word.format(**paths) for word in arguments)])
