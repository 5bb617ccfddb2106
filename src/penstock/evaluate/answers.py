"""Answer a batch of samples through a TieredCache with `model.generate`, and count what it took."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.evaluate.accuracy_settings import Setting
from penstock.evaluate.retrieval_counts import Counts, RetrievalWatch
from penstock.evaluate.tasks import Sample
from penstock.generation.chunked_prefill import read_ahead
from penstock.generation.prompts import PromptBatch, make_batch
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import CausalLM, LoadedModel
from penstock.workloads.prefilled import EXACT_TAIL, PrefilledText


@dataclass(frozen=True, kw_only=True)
class Question:
    """Samples as one padded batch."""

    samples: list[Sample]
    batch: PromptBatch
    new_tokens: int
    pad_token_id: int

    @property
    def max_tokens(self) -> int:
        """What a cache must hold: prompt, padding and answer."""
        return self.batch.padded_tokens + self.new_tokens


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What one setting said to one question, and its cost."""

    texts: list[str]
    """Cut where they went wrong, if only the exact answer counts."""
    seconds: float
    tokens: int
    """Tokens that were decoded, all rows counted until the last one ended."""
    read_bytes: int
    units_wanted: int
    units_hit: int
    ledger_bytes: int
    full_cache_bytes: int
    units_reused: int = 0
    retrieval: Counts | None = None
    """When layers retrieved, for methods that do not at every step (with a shared prefill)."""
    sparse_tokens: int = 0
    """Tokens of the answers that came out of a step over a selection: all but the first ones, which
    exact prefill gives; none where everything is attended to."""


class WrongAlready:
    """A stopping criterion of `generate`: ends an answer that can no longer be right, where nothing
    but the exact answer counts.

    Answers of hundreds of tokens that go wrong at the start would otherwise be decoded to their
    end; the score is 0 either way. Texts are looked at every `_LOOK_TOKENS` tokens.
    """

    _LOOK_TOKENS = 8

    def __init__(self, question: Question, tokenizer: Any) -> None:
        self._expected = [" ".join(sample.answer.split()) for sample in question.samples]
        self._prompt_tokens = question.batch.padded_tokens
        self._tokenizer = tokenizer
        self._wrong = [False] * len(self._expected)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Which rows are over; bool [batch]. `input_ids` is int64 [batch, tokens]."""
        new = input_ids[:, self._prompt_tokens :]
        if new.shape[1] % self._LOOK_TOKENS == 0:
            for row, (expected, ids) in enumerate(zip(self._expected, new.tolist(), strict=True)):
                if not self._wrong[row]:
                    text = self._tokenizer.decode(ids, skip_special_tokens=True)
                    # A character may be cut in two by the end of the text so far.
                    so_far = " ".join(text.rstrip("\ufffd").split())
                    self._wrong[row] = not expected.startswith(so_far)
        return torch.tensor(self._wrong, device=input_ids.device)


class SharedPrefill(PrefilledText):
    """A question's prompts but their last tokens, put into every setting's cache."""

    def __init__(
        self, model: CausalLM, question: Question, chunk: int,
        progress: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Prefill all but the last `EXACT_TAIL` tokens, `chunk` tokens at a time.

        Args:
            progress: see `PrefilledText`.
        """
        batch = question.batch
        shortest = min(len(ids) for ids in batch.token_ids)
        end = batch.padded_tokens - min(EXACT_TAIL, max(2, shortest - 2))
        super().__init__(
            model, batch.input_ids[:, :end], chunk=chunk,
            attention_mask=batch.attention_mask[:, :end], progress=progress,
        )  # fmt: skip


def ask(loaded: LoadedModel, samples: Sequence[Sample]) -> Question:
    """Encode samples as one batch, padded on the left.

    Raises:
        PromptError: a prompt does not fit the model.
    """
    new_tokens = max(sample.max_new_tokens for sample in samples)
    assert loaded.tokenizer is not None
    pad = loaded.tokenizer.pad_token_id
    pad_token_id = 0 if pad is None else int(pad)
    batch = make_batch(
        loaded, [sample.token_ids or sample.prompt for sample in samples], new_tokens=new_tokens,
        pad_token_id=pad_token_id,
    )  # fmt: skip
    return Question(
        samples=list(samples), batch=batch, new_tokens=new_tokens, pad_token_id=pad_token_id
    )


def answer(
    loaded: LoadedModel, question: Question, setting: Setting, *, chunk: int,
    shared: SharedPrefill | None, store: str = "auto",
) -> Answers:  # fmt: skip
    """Let one setting answer.

    Args:
        chunk: tokens per forward pass of the prompt, when nothing is shared.
        shared: the prompt's keys and values; None to prefill through the setting's own cache.

    Raises:
        BudgetError: the budget is too small.
    """
    model: Any = loaded.model
    batch = question.batch
    device = model.get_input_embeddings().weight.device
    start = time.perf_counter()
    with TieredCache(
        loaded.model, setting.policy, memory=setting.memory, store=store,
        max_tokens=question.max_tokens, batch_size=len(question.samples),
    ) as cache:  # fmt: skip
        extra: dict[str, Any] = {}
        if shared is not None:
            shared.put_into(cache)
        else:
            read_ahead(loaded.model, cache, question.batch, max(2, chunk))
        watch = RetrievalWatch(cache)
        if all(sample.is_all_or_nothing for sample in question.samples):
            extra["stopping_criteria"] = [WrongAlready(question, loaded.tokenizer)]
        with torch.no_grad():
            out = model.generate(
                input_ids=batch.input_ids.to(device),
                attention_mask=batch.attention_mask.to(device), **cache_argument(model, cache),
                max_new_tokens=question.new_tokens, do_sample=False,
                pad_token_id=question.pad_token_id, **extra,
            )  # fmt: skip
        seconds = time.perf_counter() - start
        decode, report = cache.stats.decode, cache.report()
        sparse = not cache.plan.is_resident and (cache.policy.retrieves or cache.policy.drops)
    assert loaded.tokenizer is not None
    new = out[:, batch.padded_tokens :].cpu()
    steps = _steps(new, model, question)
    return Answers(
        texts=[str(loaded.tokenizer.decode(row, skip_special_tokens=True)) for row in new],
        seconds=seconds, tokens=decode.tokens, read_bytes=decode.read_bytes,
        units_wanted=decode.units_wanted, units_hit=decode.units_hit,
        units_reused=decode.units_reused,
        retrieval=watch.counts(steps, batch.padded_tokens), sparse_tokens=sum(steps) * sparse,
        ledger_bytes=report.used_bytes, full_cache_bytes=report.full_cache_bytes,
    )  # fmt: skip


def _steps(new: Tensor, model: Any, question: Question) -> list[int]:
    """Decode steps of each answer: all its tokens but the first, which comes out of prefill.

    Args:
        new: what was generated, with padding where an answer had ended. int64 [batch, tokens]
    """
    ends = model.generation_config.eos_token_id
    over = [question.pad_token_id, *([ends] if isinstance(ends, int) else ends or [])]
    ended = torch.isin(new, torch.tensor(over))
    return ((~ended).cumprod(dim=1).sum(dim=1) - 1).clamp_min(0).tolist()
