"""PolicyContract: what every policy must hold, as tests that a new policy's tests inherit."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, fields, replace
from itertools import cycle
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock.core.errors import BudgetError, CacheStateError, FetchError
from penstock.core.shape import KVShape
from penstock.engine.adapter import LowRankAdapter
from penstock.engine.attention_call import AttentionCall
from penstock.engine.policy import SelectionPolicy
from penstock.engine.tiered_runtime import TieredRuntime
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.calibrate import calibrate
from penstock.testing.allocated_memory import allocated_bytes
from penstock.testing.faulty_file import FaultyFile
from penstock.testing.mirrored_runtime import SCALING, SHAPE, MirroredRuntime, make_runtime
from penstock.testing.tiny_models import VOCABULARY, tiny_model

ALL = 10**6
TOLERANCE = 1e-4
"""Most that logits in float32 differ by which should be the same."""
PROMPT_TOKENS, MAX_TOKENS, PADDING = 70, 112, (0, 29)
SLACK, SCRATCH = 0.01, "tables and scratch"
"""Share of a cache's memory in small things that are not booked; what is not there between steps.
"""
SINKS = 4
SCENARIOS = {"attended": 128, "unattended": 128, "recent": 272}
"""First token of the needle."""
FAMILIES = ("llama", "qwen2")
_WIDE = KVShape(num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)


def with_fields(policy: SelectionPolicy, **wanted: Any) -> SelectionPolicy:
    """A policy with those of the `wanted` fields that it has."""
    known = {field.name for field in fields(policy)}
    return replace(policy, **{name: wanted[name] for name in known & wanted.keys()})


def prompt(batch: int = 2, tokens: int = PROMPT_TOKENS) -> dict[str, Tensor]:
    """Random tokens; the second of two rows is padded on the left."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (batch, tokens), generator=draw)
    mask = torch.ones_like(ids)
    for row in range(batch if batch > 1 else 0):
        ids[row, : PADDING[row]] = mask[row, : PADDING[row]] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: PreTrainedModel, cache: Any, inputs: dict[str, Tensor]) -> Any:
    """Five greedy tokens, with the logits of each."""
    return model.generate(
        **inputs, **cache_argument(model, cache), max_new_tokens=5, do_sample=False, pad_token_id=0,
        eos_token_id=None, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip


@functools.cache
def _model(family: str) -> PreTrainedModel:
    """A tiny model, which the checks share."""
    return tiny_model(family)


@functools.cache
def _adapter(family: str) -> LowRankAdapter:
    """A basis of keys of other tokens."""
    text = torch.randint(3, VOCABULARY, (256,), generator=torch.Generator().manual_seed(1))
    return calibrate(_model(family), [text])


@functools.cache
def _plain_answer(family: str) -> Any:
    """What the model answers without Penstock."""
    model = _model(family)
    return generate(model, DynamicCache(config=model.config), prompt())


def _require_same(expected: Any, actual: Any, what: str) -> None:
    assert torch.equal(expected.sequences, actual.sequences), f"{what}: other tokens"
    difference = (torch.stack(expected.logits) - torch.stack(actual.logits)).abs().max().item()
    assert difference <= TOLERANCE, f"{what}: logits are off by {difference:.2g}"


class PolicyContract:
    """Inherit from it, and say which policies are tested:

        class TestMine(PolicyContract):
            policies = (Mine(), Mine(group_tokens=4))

    The checks run tiny random models and caches on a CPU. `everything` and `few` set
    `selected_tokens`, `window_tokens` and `sink_tokens`; a policy without them overrides the two.
    """

    policies: ClassVar[Sequence[SelectionPolicy]] = ()
    """What is tested."""
    unseen: ClassVar[Mapping[tuple[str, str], str]] = {}
    """From a policy's name and one of `SCENARIOS` to the reason why it must not find the needle:
    what it forgot before it was asked."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every check with every policy; models of two families take turns."""
        assert self.policies, f"{type(self).__name__}: say which policies are tested"
        names = [policy.name for policy in self.policies]
        if "family" in metafunc.fixturenames:
            pairs = list(zip(self.policies, cycle(FAMILIES), strict=False))
            metafunc.parametrize(("policy", "family"), pairs, ids=names)
        elif "policy" in metafunc.fixturenames:
            metafunc.parametrize("policy", self.policies, ids=names)

    def everything(self, policy: SelectionPolicy, window_tokens: int = 8) -> SelectionPolicy:
        """The policy with every token selected."""
        return with_fields(
            policy, selected_tokens=ALL, window_tokens=window_tokens, sink_tokens=SINKS
        )

    def few(self, policy: SelectionPolicy, tokens: int = 32) -> SelectionPolicy:
        """The policy with a small selection, of one unit at least."""
        tokens = max(tokens, policy.unit_tokens)
        return with_fields(policy, selected_tokens=tokens, window_tokens=8, sink_tokens=SINKS)

    # Answers ------------------------------------------------------------------------------------

    def test_a_full_budget_is_full_attention(self, policy: SelectionPolicy, family: str) -> None:
        """With everything selected, tokens and logits are those of plain attention, twice."""
        model, everything = _model(family), self.everything(policy)
        with _cache(model, everything) as cache:
            assert cache.plan.is_resident == policy.stays_resident, "it is exact by residence only"
            for _ in range(2):
                _require_same(
                    _plain_answer(family), generate(model, cache, prompt()), "a full budget"
                )
                cache.reset()

    def test_exact_is_the_plain_model(self, policy: SelectionPolicy, family: str) -> None:
        """Exact mode attends to everything, whatever is selected."""
        model, few = _model(family), self.few(policy)
        with _cache(model, few, exact=True) as cache:
            _require_same(_plain_answer(family), generate(model, cache, prompt()), "exact mode")

    def test_a_row_answers_as_it_does_alone(self, policy: SelectionPolicy) -> None:
        """Another row beside it, which is padded, changes nothing of what is selected."""
        model, few = _model("llama"), self.few(policy)
        tokens = min(PROMPT_TOKENS + 6 * policy.unit_tokens, 300)
        both = prompt(tokens=tokens)
        # A basis of the prompt's own would be fitted to the keys of all rows, and codes differ.
        sizes = {"max_tokens": tokens + 8, "adapter": _adapter("llama")}
        with _cache(model, few, **sizes) as cache:
            found = generate(model, cache, both)
        with _cache(model, few, batch_size=1, **sizes) as cache:
            alone = generate(model, cache, {name: ids[:1] for name, ids in both.items()})
        assert torch.equal(found.sequences[:1], alone.sequences), "other tokens than alone"
        for ours, theirs in zip(found.logits, alone.logits, strict=True):
            difference = (ours[:1] - theirs).abs().max().item()
            assert difference <= TOLERANCE, f"logits are off by {difference:.2g}"

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_a_needle_is_found_at_a_tenth(self, policy: SelectionPolicy, scenario: str) -> None:
        """Sixteen of 300 tokens answer, and 30 are selected. Those that drop find what they kept.

        The prompt's last queries look for the needle, but in "unattended" they and the first step
        look the other way.
        """
        # Clusters, where there are any, of the needle's size: else one is more than is selected.
        seeking = with_fields(self.few(policy, 30), tokens_per_cluster=16)
        with _runtime(seeking, 1, max_tokens=320) as runtime:
            distance = _ask_for_a_needle(runtime, SCENARIOS[scenario], scenario == "unattended")
        if reason := self.unseen.get((policy.name, scenario)):
            assert distance > 0.5, f"found after all: {reason}"
        else:
            assert distance < 0.2, f"the answer is off by {distance:.0%} of its size"

    # The past -----------------------------------------------------------------------------------

    def test_units_partition_the_past(self, policy: SelectionPolicy) -> None:
        """With all selected, no token is missing or twice after prompts, crops and reorders."""
        everything = self.everything(policy, window_tokens=4)
        for device_tier in (False, True)[: 1 + policy.device_tier]:
            with _runtime(everything, 2, device_tier=device_tier) as runtime:
                mirrored = MirroredRuntime(runtime, [0, 5])
                mirrored.step(37)
                mirrored.decode(6)
                mirrored.select_rows([1, 0])
                mirrored.decode(2, predict=True)
                mirrored.crop(31)
                mirrored.decode(3)
                mirrored.step(21)
                mirrored.decode(12, predict=True)
                mirrored.select_rows([0, 1, 1])
                mirrored.decode(5)

    def test_it_goes_on_after_a_failed_read(self, policy: SelectionPolicy) -> None:
        """The step fails, the next is refused, and behind a crop no token is missing or twice."""
        if policy.stays_resident:
            pytest.skip("reads nothing")
        everything = self.everything(policy, window_tokens=4)
        tokens = 37 + 3 * policy.unit_tokens
        with _runtime(everything, 2, max_tokens=tokens + 100) as runtime:
            files = _make_faulty(runtime)
            mirrored = MirroredRuntime(runtime, [0, 5])
            mirrored.step(tokens)
            mirrored.decode(2)
            length = mirrored.length
            for file in files:
                file.failing_reads = range(1 << 30)
            with pytest.raises(FetchError, match="on purpose"):
                mirrored.decode(80)
            with pytest.raises(CacheStateError, match="crop"):
                mirrored.decode(1)
            for file in files:
                file.failing_reads = ()
            mirrored.crop(length)
            mirrored.decode(8)

    def test_crop_reorder_and_reset_leave_a_usable_cache(self, policy: SelectionPolicy) -> None:
        """Of a model's cache with few tokens selected; a reset makes it as it was."""
        model, few = _model("llama"), self.few(policy)
        one = torch.full((2, 1), 5)

        def decode(steps: int) -> None:
            for _ in range(steps):
                length = cache.get_seq_length()
                logits = model(input_ids=one, **cache_argument(model, cache)).logits
                assert logits.isfinite().all(), "logits are not finite"
                assert cache.get_seq_length() == length + 1, "a step is not one token"

        with _cache(model, few) as cache, torch.no_grad():
            inputs = {"input_ids": prompt(1)["input_ids"].repeat(2, 1)}
            first = generate(model, cache, inputs)
            cache.crop(-20)
            assert cache.get_seq_length() == PROMPT_TOKENS + 4 - 20, "a crop of 20 is another"
            decode(2)
            cache.reorder_cache(torch.tensor([1, 1]))
            decode(2)
            model(input_ids=prompt()["input_ids"][:, :11], **cache_argument(model, cache))
            decode(2)
            cache.reset()
            assert cache.get_seq_length() == 0, "a reset leaves tokens"
            again = generate(model, cache, inputs)
            assert torch.equal(first.logits[0], again.logits[0]), "a reset leaves something behind"
            assert torch.stack(again.logits).isfinite().all(), "logits are not finite"

    # Memory -------------------------------------------------------------------------------------

    def test_the_budget_is_a_promise_and_the_policy_stays_as_it_was(
        self, policy: SelectionPolicy
    ) -> None:
        """What is too little is refused with the least that will do, which then does."""
        model, few = _model("llama"), self.few(policy)
        before = replace(few)
        with pytest.raises(BudgetError) as refused:
            _cache(model, few, memory=1)
        least = refused.value.needed_bytes
        assert least is not None, "the refusal names no budget that would do"
        with pytest.raises(BudgetError):
            _cache(model, few, memory=least - 1)
        with _cache(model, few, memory=least) as cache:
            out = generate(model, cache, prompt())
            assert torch.stack(out.logits).isfinite().all(), "logits are not finite"
            report = cache.report()
            assert 0 < report.used_bytes <= report.limit_bytes == least, "the budget is passed"
            chosen = cache.policy
        assert few == before, "a run has changed the policy"
        assert hash(few) == hash(before), "a run has changed the policy"
        for frozen in (few, chosen):
            for field in fields(frozen):
                with pytest.raises(FrozenInstanceError):
                    setattr(frozen, field.name, None)

    def test_the_ledger_agrees_with_what_is_allocated(self, policy: SelectionPolicy) -> None:
        """Everything allocated is booked; and all that is booked but scratch is there."""
        few = self.few(policy, 64)
        with _runtime(few, 2, shape=_WIDE, max_tokens=2048) as runtime:
            draw = torch.Generator().manual_seed(0)
            for count in (300, 1, 1):
                for layer in range(_WIDE.num_layers):
                    query, keys, values = (
                        torch.randn(2, heads, count, _WIDE.head_dim, generator=draw)
                        for heads in (4, 2, 2)
                    )
                    runtime.attend(layer, AttentionCall(query, keys, values, 0.125))
            report = runtime.report()
            allocated = allocated_bytes(runtime, type(policy).__module__.split(".")[0])
            most, lasting = report.used_bytes, report.used_bytes - report.items.get(SCRATCH, 0)
            assert allocated <= most * (1 + SLACK), (
                f"{allocated:,} bytes are allocated, and {most:,} booked"
            )
            assert allocated >= lasting, (
                f"{allocated:,} bytes are allocated, and {lasting:,} booked to last"
            )
        assert runtime.report().used_bytes == 0, "closing gives not everything back"


def _cache(model: PreTrainedModel, policy: SelectionPolicy, **settings: Any) -> TieredCache:
    plain: dict[str, Any] = {"store": "memory", "max_tokens": MAX_TOKENS, "batch_size": 2}
    return TieredCache(model, policy, **(plain | settings))


@contextmanager
def _runtime(policy: SelectionPolicy, batch: int, **settings: Any) -> Iterator[TieredRuntime]:
    runtime = make_runtime(policy, batch, **settings)
    try:
        yield runtime
        report = runtime.report()
        assert report.used_bytes <= report.limit_bytes, "the budget is passed"
    finally:
        runtime.close()


def _make_faulty(runtime: TieredRuntime) -> list[FaultyFile]:
    """Put files whose reads can be made to fail between a runtime and its store."""
    assert runtime._store is not None
    made = []
    for region in runtime._store._regions:
        made.append(FaultyFile(region.file))
        region.file = made[-1]
    return made


def _ask_for_a_needle(runtime: TieredRuntime, first: int, unattended: bool) -> float:
    """How far the answer is from the needle's value, as a share of its norm."""
    random = torch.Generator().manual_seed(0)
    tokens, needle = 300, slice(first, first + 16)
    query, keys, values = (
        torch.randn(1, heads, tokens, SHAPE.head_dim, generator=random) for heads in (4, 2, 2)
    )
    asked = torch.randn(1, 2, 1, SHAPE.head_dim, generator=random)
    asked = 4 * asked / asked.norm(dim=3, keepdim=True)
    value = torch.randn(1, 2, 1, SHAPE.head_dim, generator=random)
    keys[:, :, needle], values[:, :, needle] = 3 * asked, value
    sign = -1.0 if unattended else 1.0
    question = asked.repeat_interleave(2, dim=1)
    query[:, :, -32:] = sign * question
    for layer in range(SHAPE.num_layers):
        runtime.attend(layer, AttentionCall(query, keys, values, SCALING))
    for final in (sign * question, question):
        new = torch.randn(1, 2, 1, SHAPE.head_dim, generator=random)
        for layer in range(SHAPE.num_layers):
            out = runtime.attend(layer, AttentionCall(final, new, new, SCALING))
    wanted = value.repeat_interleave(2, dim=1).transpose(1, 2)
    return float((out - wanted).norm() / wanted.norm())
