"""LLM takes from a tuned config what its caller left open, batch by batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.errors import AdapterError, ConfigError
from penstock.generation.engine import LLM
from penstock.generation.output import RunReport
from penstock.generation.sampling import SamplingParams
from penstock.methods import KVSwap, Quest, SelectionPolicy
from penstock.methods.search_space import fields_of
from penstock.methods.tuned_config import Figures, Solution, TunedConfig
from penstock.models.calibrate import calibrate
from penstock.models.fingerprint import fingerprint
from penstock.testing.tiny_models import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = [3 + i % 150 for i in range(190)]
SMALL = KVSwap(group_tokens=8, selected_tokens=32, window_tokens=8, rank=16, index_bits=8)
LARGE = replace(SMALL, group_tokens=4, selected_tokens=48)
PAGES = Quest(selected_tokens=32, window_tokens=16)
LIMIT_BYTES = 1 << 20
FIGURES: Figures = {
    "tokens_per_s": 1.0, "first_token_s": 1.0, "resident_bytes": 1, "read_bytes_per_token": 1.0,
    "kl": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def config(model: Any) -> TunedConfig:
    def solution(batch: int, context: int, policy: SelectionPolicy) -> Solution:
        return Solution(
            batch=batch, context=context, policy=policy.name, fields=fields_of(policy),
            limit_bytes=batch * LIMIT_BYTES, predicted=FIGURES, measured=None, reason="Fast.",
            is_pick=policy.name == "kvswap",
        )  # fmt: skip

    return TunedConfig(
        model="tiny", fingerprint=fingerprint(model), disk="memory", simulated=False,
        max_context=400, max_batch=2, limit_bytes=2 * LIMIT_BYTES, floor=0.1, adapter=None,
        explanation="", versions={},
        solutions=(
            solution(1, 200, SMALL), solution(1, 400, LARGE), solution(2, 400, SMALL),
            solution(1, 400, PAGES),
        ),
    )  # fmt: skip


def outcome(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], RunReport]:
    outputs = llm.generate(prompts, GREEDY)
    return [output.token_ids for output in outputs], outputs[0].run


@pytest.mark.parametrize(
    ("wanted", "batch", "length", "policy", "context"),
    [
        (None, 1, 190, SMALL, 200), ("auto", 1, 192, SMALL, 200), ("auto", 1, 193, LARGE, 400),
        (None, 2, 150, SMALL, 400), ("kvswap", 1, 190, SMALL, 200), ("quest", 1, 190, PAGES, 400),
    ],
)  # fmt: skip
def test_the_solution_of_the_batch_runs(
    model: Any, config: TunedConfig, wanted: str | None, batch: int, length: int,
    policy: SelectionPolicy, context: int,
) -> None:  # fmt: skip
    prompts = [(PROMPT * 2)[row : row + length] for row in range(batch)]
    tokens, run = outcome(LLM(model, policy=wanted, config=config), prompts)
    limit = batch * LIMIT_BYTES
    by_hand = outcome(LLM(model, policy=policy, memory=limit, store="memory"), prompts)
    assert (tokens, run.memory) == (by_hand[0], by_hand[1].memory)
    assert run.memory.limit_bytes == limit
    assert run.store == "host memory"
    assert run.stats.decode.read_bytes == by_hand[1].stats.decode.read_bytes > 0
    chosen = ", ".join(f"{name}={value}" for name, value in fields_of(policy).items())
    size = f"{batch} x {context}"
    assert run.notices[0] == (
        f"config: {policy.name} ({chosen}) tuned for {size} tokens, disk memory"
    )


def test_what_the_caller_gives_wins(model: Any, config: TunedConfig, tmp_path: Path) -> None:
    _, run = outcome(LLM(model, memory="600KiB", store=tmp_path, config=config), [PROMPT])
    assert run.memory.limit_bytes == 600 << 10 != LIMIT_BYTES
    assert str(tmp_path) in run.store
    assert run.notices[0].startswith("config: kvswap (group_tokens=8")
    _, run = outcome(LLM(model, memory=None, config=config), [PROMPT])
    assert run.memory.limit_bytes not in (LIMIT_BYTES, 2 * LIMIT_BYTES)
    _, run = outcome(LLM(model, policy=PAGES, config=config), [PROMPT])
    assert (run.policy, run.memory.limit_bytes) == ("quest", LIMIT_BYTES)
    assert [notice for notice in run.notices if notice.startswith("config")] == []


def test_a_simulated_disk_of_the_config_is_simulated(model: Any, config: TunedConfig) -> None:
    tuned = replace(config, disk="nvme", simulated=True)
    assert outcome(LLM(model, config=tuned), [PROMPT])[1].simulated == "nvme"
    assert outcome(LLM(model, store="memory", config=tuned), [PROMPT])[1].simulated is None


def test_a_path_is_read_and_its_adapter_used(
    model: Any, config: TunedConfig, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    replace(config, adapter="keys.safetensors").save(path)
    with pytest.raises(AdapterError, match=r"keys\.safetensors is not there; put it beside"):
        LLM(model, config=path)
    calibrate(model, [torch.tensor(PROMPT)], rank=16, window_tokens=64).save(
        tmp_path / "keys.safetensors"
    )
    without = outcome(LLM(model, config=config), [PROMPT])[1]
    assert any("no low-rank adapter" in notice for notice in without.notices)
    for given in (path, str(path)):
        assert len(outcome(LLM(model, config=given), [PROMPT])[1].notices) == 1
    other = tmp_path / "other.safetensors"
    with pytest.raises(AdapterError, match="other"):
        LLM(model, adapter=other, config=path).generate([PROMPT], GREEDY)


def test_refusals(model: Any, config: TunedConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy auto needs a tuned config: run penstock tune"):
        LLM(model, policy="auto")
    with pytest.raises(ConfigError, match="there is no config"):
        LLM(model, config=tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"another model: tiny \(fingerprint"):
        LLM(tiny_model("llama", seed=1), config=config)
    llm = LLM(model, config=config)
    with pytest.raises(ConfigError, match="up to 400 tokens, prompt and answer, and these are 408"):
        llm.generate([PROMPT * 2 + PROMPT[:20]], GREEDY)
    with pytest.raises(ConfigError, match="up to 2 sequences, and these are 3"):
        llm.generate([PROMPT] * 3, GREEDY)
    with pytest.raises(ConfigError, match="up to 2 sequences"):
        LLM(model, policy=PAGES, config=config).generate([PROMPT] * 3, GREEDY)
    with pytest.raises(ConfigError, match="no solution of loki, only of kvswap, quest"):
        LLM(model, policy="loki", config=config).generate([PROMPT], GREEDY)


def test_without_a_config_the_policy_is_kvswap(model: Any) -> None:
    run = outcome(LLM(model, memory=None, store="memory"), [PROMPT])[1]
    assert run.policy == "kvswap"
    assert not any(notice.startswith("config") for notice in run.notices)
