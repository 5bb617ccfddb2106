"""Every name of vLLM's is taken with its meaning or refused by name, as the table of the docs
says."""

import io
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.generation.engine import LLM
from penstock.generation.engine_arguments import LEFT_OUT_ARGUMENTS
from penstock.generation.progress_bar import ProgressBar
from penstock.generation.sampling import SamplingParams
from penstock.generation.sampling_fields import LEFT_OUT
from penstock.models.loader import LoadedModel
from penstock.testing.tiny_chat import byte_tokenizer, tiny_chat_model

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "vllm.md"

TODAY = """
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
    prompt_logprob_token_ids prompt_logprob_start logprob_token_ids flat_logprobs detokenize
    skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind
    stream_interval skip_clone output_text_buffer_length structured_outputs logit_bias
    allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget
    repetition_detection routed_experts_prompt_start trace_decode_token_ids
"""
"""Fields of vLLM's SamplingParams."""
FORMERLY = """
    best_of truncate_prompt_tokens logits_processors guided_decoding use_beam_search length_penalty
    early_stopping
"""
"""Those that its former releases had."""
DEFAULTS: dict[str, Any] = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": None,
    "stop_token_ids": None, "ignore_eos": False, "max_tokens": 16, "min_tokens": 0,
    "logprobs": None, "prompt_logprobs": None, "detokenize": True, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
    "logit_bias": None, "allowed_token_ids": None, "bad_words": None, "best_of": None,
    "truncate_prompt_tokens": None, "logits_processors": None,
}  # fmt: skip
"""vLLM's, of the fields that are the same."""


def table() -> dict[str, tuple[str, str]]:
    """The page's rows: field, verdict and note."""
    section = PAGE.read_text().partition("## SamplingParams")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ?(.*?) ?\|$", section, flags=re.MULTILINE)
    assert len(rows) == len({name for name, *_ in rows})
    return {name: (verdict, note) for name, verdict, note in rows}


def test_every_field_of_vllm_is_the_same_or_refused() -> None:
    same = {field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams)}
    assert same == DEFAULTS
    assert sorted([*same, *LEFT_OUT]) == sorted([*TODAY.split(), *FORMERLY.split()])


def test_the_table_of_the_docs_says_so() -> None:
    rows = table()
    assert {name for name, (verdict, _) in rows.items() if verdict == "same"} == set(DEFAULTS)
    refused = {name: note for name, (verdict, note) in rows.items() if verdict == "refused"}
    assert set(refused) == set(LEFT_OUT)
    for name, note in refused.items():
        reason = LEFT_OUT[name].reason
        assert note == f"{reason[0].upper()}{reason[1:]}."
    assert len(rows) == len(DEFAULTS) + len(LEFT_OUT)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_refused_by_name(name: str) -> None:
    given: dict[str, Any] = {name: object()}
    with pytest.raises(ConfigError, match=re.escape(f"SamplingParams has no {name}: ")):
        SamplingParams(**given)
    for neutral in LEFT_OUT[name].neutral:
        asks_nothing: dict[str, Any] = {name: neutral}
        assert SamplingParams(**asks_nothing) == SamplingParams()


def test_a_field_that_nothing_has() -> None:
    given: dict[str, Any] = {"temprature": 0.5}
    with pytest.raises(ConfigError, match=r"^SamplingParams has no temprature$"):
        SamplingParams(**given)
    with pytest.raises(AttributeError):
        SamplingParams().temprature = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n": 0}, "n=0 must be at least 1"),
        ({"n": 3, "best_of": 2}, "best_of=2 must be at least n=3"),
        ({"n": 2, "temperature": 0}, "2 answers of greedy decoding are the same"),
        ({"best_of": 2, "temperature": 0}, "2 answers of greedy decoding are the same"),
        ({"presence_penalty": 2.1}, r"presence_penalty=2.1 must lie in \[-2, 2\]"),
        ({"frequency_penalty": -3}, r"frequency_penalty=-3 must lie in \[-2, 2\]"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 must be above 0"),
        ({"min_p": 1.1}, r"min_p=1.1 must lie in \[0, 1\]"),
        ({"min_tokens": -1}, "min_tokens=-1 must be 0 or more"),
        ({"min_tokens": 17}, "min_tokens=17 is more than self.max_tokens=16"),
        ({"logprobs": -2}, "logprobs=-2 must be"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs=1.5 must be a whole number"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 leaves no prompt"),
        ({"stop": ["a"], "detokenize": False}, "stop needs the text"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids=\['a'\] must be a list of token ids"),
        ({"stop_token_ids": 5}, "stop_token_ids=5 must be a list"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"bad_words": "word"}, "bad_words='word' must be a list"),
        ({"bad_words": [""]}, "none of them empty"),
        ({"logit_bias": {"a": 1.0}}, "must be numbers by token id"),
        ({"logit_bias": [1]}, "must be numbers by token id"),
        ({"logits_processors": [5]}, "must be a list of functions"),
    ],
)
def test_a_value_out_of_its_range(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SamplingParams(**given)


def test_values_that_vllm_reads_as_others() -> None:
    assert SamplingParams(logprobs=True, prompt_logprobs=True).logprobs == 1
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(top_k=-1).top_k == -1


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_chat_model()


@pytest.mark.parametrize("name", LEFT_OUT_ARGUMENTS)
def test_arguments_of_llm_that_are_left_out(loaded: LoadedModel, name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"LLM has no {name}: ")):
        make(loaded, {name: object()})
    for neutral in LEFT_OUT_ARGUMENTS[name].neutral:
        make(loaded, {name: neutral})


def make(loaded: LoadedModel, given: dict[str, Any]) -> LLM:
    return LLM(loaded, **given)


def test_arguments_of_llm(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^LLM has no modell$"):
        LLM(loaded, modell=1)
    with pytest.raises(ConfigError, match=r"max_model_len=5000 must lie in 2 to 4,096"):
        LLM(loaded, max_model_len=5000)
    with pytest.raises(ConfigError, match=r"quantization='awq', but .* are not quantised"):
        LLM(loaded, quantization="awq")
    loaded.model.config.quantization_config = {"quant_method": "gptq"}
    try:
        LLM(loaded, quantization="gptq_marlin")
        with pytest.raises(ConfigError, match=r"quantization='awq', but .* has gptq weights"):
            LLM(loaded, quantization="awq")
    finally:
        del loaded.model.config.quantization_config
    with pytest.raises(ConfigError, match="revision='x' is for names of models"):
        LLM(loaded, revision="x")
    with pytest.raises(ConfigError, match=r"seed=1\.5"):
        LLM(loaded, seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="generation_config='folder' is neither"):
        LLM(loaded, generation_config="folder")  # type: ignore[arg-type]
    tiny_chat_model(folder=tmp_path)
    made = LLM(model=str(tmp_path), dtype="half", max_logprobs=500)
    assert str(made.model.dtype) == "torch.float16"


def test_a_tokenizer_by_name(loaded: LoadedModel, tmp_path: Path) -> None:
    other: Any = byte_tokenizer()
    other.add_tokens(["wholeword"])
    other.save_pretrained(tmp_path)
    for model in (loaded, loaded.model):
        named: Any = LLM(model, tokenizer=tmp_path).get_tokenizer()
        assert named.convert_tokens_to_ids("wholeword") == len(other) - 1
    with pytest.raises(ConfigError, match="came without a tokenizer; give LLM tokenizer="):
        LLM(loaded.model).get_tokenizer()
    with pytest.raises(Exception, match=r"^tokenizer .*nothing: "):
        LLM(loaded, tokenizer=tmp_path / "nothing", offline=True)


def test_arguments_of_generate(loaded: LoadedModel) -> None:
    llm = LLM(loaded, memory=None, store="memory")
    for name in ("lora_request", "prompt_token_ids", "tokenization_kwargs", "priority"):
        given: dict[str, Any] = {name: 1}
        with pytest.raises(ConfigError, match=f"generate has no {name}: "):
            llm.generate("a", **given)
    with pytest.raises(ConfigError, match=r"^generate has no tokens$"):
        llm.generate("a", tokens=1)
    assert llm.generate("a", lora_request=None, tokenization_kwargs={})


def test_methods_that_are_left_out(loaded: LoadedModel) -> None:
    llm: Any = LLM(loaded)
    with pytest.raises(AttributeError, match=r"LLM has no beam_search: .* by BeamSearcher"):
        llm.beam_search("a")
    with pytest.raises(AttributeError, match=r"^LLM has no tokens$"):
        llm.tokens  # noqa: B018
    assert not hasattr(llm, "embed")


class Bar:
    """Stands for tqdm."""

    made: list["Bar"]

    def __init__(self, **options: Any) -> None:
        self.options, self.n, self.closed = options, 0, False
        Bar.made.append(self)

    def update(self, by: int) -> None:
        self.n += by

    def close(self) -> None:
        self.closed = True


def test_a_bar_of_the_callers_own(loaded: LoadedModel) -> None:
    Bar.made = []
    llm = LLM(loaded, memory=None, store="memory", prefill_chunk_size=8)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate(["The capital of", "The"], params, use_tqdm=Bar)
    reading, answering = Bar.made
    assert (reading.options["desc"], reading.n, reading.options["total"]) == (
        "Reading prompts",
        15,
        15,
    )
    assert (answering.options["desc"], answering.n) == ("Answering", 8)
    assert answering.options["total"] == 8
    assert reading.closed
    assert answering.closed


def test_a_bar_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert not ProgressBar(use_tqdm=False).is_shown
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not ProgressBar(use_tqdm=True).is_shown
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setattr("penstock.generation.progress_bar._WAIT_S", 0.0)
    bar = ProgressBar(use_tqdm=True)
    bar.on_prefill(5, 10)
    bar.close()
    assert "Reading prompts" in screen.getvalue()
    assert not ProgressBar(use_tqdm=False).is_shown
