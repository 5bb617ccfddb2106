"""BatchRun: prompts that are read and answered together, over a cache of their own."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.errors import BudgetError
from penstock.generation.answer import Answer, EndTokens
from penstock.generation.answer_text import stops_with
from penstock.generation.chunked_prefill import OnLogits, prefill_chunks
from penstock.generation.decoding import (
    DecodeSteps,
    end_tokens,
    generate_arguments,
    padding_token,
    vocabulary_size,
)
from penstock.generation.output import (
    CompletionOutput,
    RequestOutput,
    RunReport,
    StreamedOutput,
)
from penstock.generation.prompt_logprobs import PromptLogprobs
from penstock.generation.prompts import PromptBatch
from penstock.generation.sampler import Choice, Sampler, SamplingRow
from penstock.generation.sampling import SamplingParams
from penstock.generation.token_text import bad_word_ids, own_stop_texts
from penstock.generation.verified_counts import Verified
from penstock.generation.verified_decoding import (
    UNCHECKED,
    Tokens,
    VerifiedDecoding,
    check_verifiable,
)
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel
from penstock.models.weight_access import model_device

OnText = Callable[[int, str], None]
"""Called with the number of an answer and its next piece. Answers count over all prompts in order:
without `n`, that is the number of the prompt."""
OnNews = Callable[[StreamedOutput], None]
"""Called with what a step adds to one answer."""

_SEEDS = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt of a call, beside its tokens."""

    request_id: str
    index: int
    """Number of the prompt in the call."""
    params: SamplingParams
    max_tokens: int
    """Most new tokens of each of its answers; not more than there is room for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listeners:
    """What is called while answers come."""

    on_text: OnText | None = None
    on_news: OnNews | None = None
    on_step: Callable[[int], None] | None = None
    """Called behind each step with the tokens that it has added; may raise to end the run."""
    should_stop: Callable[[], bool] = lambda: False
    """Asked behind each step; true ends the answers ("abort")."""


class BatchRun:
    """Prompts in one cache: read together, forked to rows of `n` answers each, decoded together.

    Rows end each on their own, and are carried along as padding until the last one ends.
    """

    def __init__(
        self, loaded: LoadedModel, batch: PromptBatch, requests: Sequence[Request],
        cache: TieredCache, *, sampler: Sampler, chunk: int, listeners: Listeners,
        verify: int | None = None,
    ) -> None:  # fmt: skip
        """Prepare the answers.

        Args:
            batch: with a row for each request.
            cache: may hold tokens that the batch begins with; gets a row for each answer.
            chunk: tokens per forward pass of prompts.
            verify: draft so many tokens and check them exactly; None: decode one at a time.

        Raises:
            ConfigError: tokens are to be verified, and the cache's policy drops some.
        """
        if verify is not None:
            check_verifiable(cache)
        self._verify, self._verified = verify, None if verify is None else Verified()
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._batch, self._requests, self._cache = batch, requests, cache
        self._sampler, self._listeners = sampler, listeners
        self._ends = end_tokens(self._model, self._tokenizer)
        self._pad = padding_token(self._model, self._ends)
        self._prompt_logprobs = PromptLogprobs(
            batch, [each.params.prompt_logprobs for each in requests], self._tokenizer
        )
        self._chunk = self._prompt_logprobs.chunk(chunk, vocabulary_size(self._model))
        self._answers = [self._answers_of(row, self._ends) for row in range(len(requests))]
        self._rows = [answer for answers in self._answers for answer in answers]
        self._choices: dict[int, Choice] = {}
        self.tokens: list[int] = []
        """The newest token of each row; padding of those that were done before."""
        self._notices = loaded.notices
        self._prefill_s = self._first_token_s = self._last_token_s = 0.0

    def run(self) -> None:
        """Read the prompts and make the answers."""
        for _ in self.read():
            pass
        self.decode()

    def read(self) -> Iterator[int]:
        """Read the prompts, and choose the first tokens.

        Yields:
            The tokens that are in behind each chunk, padding counted.
        """
        started_s, prompts = time.perf_counter(), self._prompt_logprobs
        # Of a stored text, a cache may have begun with a row for each answer.
        if self._cache.batch_size == len(self._rows):
            logits = yield from self._prefill(self._batch.take(self._row_prompts()))
        else:
            on_logits = prompts.take if prompts.is_wanted else None
            logits = yield from self._fork((yield from self._prefill(self._batch, on_logits)))
        self.step(logits)
        self._first_token_s = self._last_token_s
        self._prefill_s = self._first_token_s - started_s

    def step(self, logits: Tensor) -> None:
        """Choose and take a token for each row that is not done. logits: [rows, vocabulary]"""
        self.tokens = self._choose(logits)
        self._take()

    def decode(self) -> None:
        """All tokens behind the first ones, step by step."""
        if not self.is_done:
            self._decode(self.tokens)

    @property
    def is_done(self) -> bool:
        """Whether every answer is over."""
        return all(each.finish_reason is not None for each in self._rows)

    @property
    def num_rows(self) -> int:
        """Answers, each of which has a row of the cache."""
        return len(self._rows)

    @property
    def new_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(len(answer.token_ids) for answer in self._rows)

    def end(self) -> None:
        """Answers that are not over end here ("abort")."""
        for row, answer in enumerate(self._rows):
            self._pass_on(row, answer, answer.end("abort"))

    def outputs(self, report: RunReport) -> list[RequestOutput]:
        """What is returned, one for each prompt."""
        return [
            RequestOutput(
                request_id=request.request_id, prompt=self._batch.texts[row],
                prompt_token_ids=self._batch.token_ids[row],
                prompt_logprobs=self._prompt_logprobs.rows[row],
                outputs=_best(self._answers[row], request.params), run=report,
            )
            for row, request in enumerate(self._requests)
        ]  # fmt: skip

    def report(self, notices: tuple[str, ...], *, restored: int, recomputed: int) -> RunReport:
        """What the run took.

        Args:
            notices: of the caller, in front of the model's and the cache's.
            restored, recomputed: tokens; see `RunReport`.
        """
        cache = self._cache
        new_tokens = self.new_tokens
        return RunReport(
            policy=cache.policy.name,
            exact=cache._settings.exact,
            prompt_tokens=sum(len(ids) for ids in self._batch.token_ids),
            new_tokens=new_tokens,
            prefill_s=self._prefill_s,
            decode_s=self._last_token_s - self._first_token_s,
            decode_tokens=new_tokens - len(self._rows),
            stats=cache.stats,
            memory=cache.report(),
            store=cache.store_description,
            simulated=cache.simulated,
            notices=(*notices, *self._notices, *cache.notices),
            restored_tokens=restored,
            recomputed_tokens=recomputed,
            verified=self._verified,
        )

    def _answers_of(self, row: int, ends: EndTokens) -> list[Answer]:
        request, device = self._requests[row], model_device(self._model)
        own = () if self._tokenizer is None else own_stop_texts(self._model)
        params = stops_with(request.params, own)
        words = bad_word_ids(self._tokenizer, params.bad_words or ())
        answers = []
        for number in range(params.num_answers):
            sampling = SamplingRow(
                params=params, prompt_token_ids=self._batch.token_ids[row], bad_words=words
            )
            if self._verify is not None:
                sampling.noise = {}
            if params.seed is not None:
                sampling.seed((params.seed + number + _SEEDS) % _SEEDS, device)
            answers.append(
                Answer(sampling, self._tokenizer, max_tokens=request.max_tokens, ends=ends)
            )
        return answers

    def _prefill(
        self, batch: PromptBatch, on_logits: OnLogits | None = None
    ) -> Generator[int, None, Tensor]:
        """Read a batch; returns the logits behind it. [rows, vocabulary]"""
        held = self._cache.get_seq_length()
        if self._verify is not None and 0 < held == batch.padded_tokens - 1:
            passing = Tokens(self._model, self._cache, batch.attention_mask, self._pad)
            logits = passing.exactly([batch.input_ids[:, -1].tolist()])[:, 0]
            self._cache.crop(-1)
            return logits
        chunks = prefill_chunks(self._model, self._cache, batch, self._chunk, on_logits)
        return (yield from chunks)

    def _fork(self, logits: Tensor) -> Generator[int, None, Tensor]:
        """Give each answer a row of the cache, and of the logits. [answers, vocabulary]"""
        if len(self._rows) == len(self._requests):
            return logits
        rows = self._row_prompts()
        try:
            self._cache.batch_select_indices(rows)
        except BudgetError:
            self._notices += ("prompts were read once for each answer: the budget holds no fork",)
            self._cache.reset()
            return (yield from self._prefill(self._batch.take(rows)))
        return logits[rows.to(logits.device)]

    def _row_prompts(self) -> Tensor:
        """The prompt of each answer. int64 [answers]"""
        counts = torch.tensor([len(answers) for answers in self._answers])
        return torch.arange(len(self._answers)).repeat_interleave(counts)

    def _decode(self, tokens: Sequence[int]) -> None:
        """All steps behind the first token."""
        if self._verify is not None:
            if self._cache.is_exact:
                self._notices += (UNCHECKED,)
            else:
                self._decode_verified(list(tokens), self._verify)
                return
        rows, device = self._row_prompts(), model_device(self._model)
        first = torch.tensor(tokens)[:, None]
        ids = torch.cat([self._batch.input_ids[rows], first], dim=1)
        mask = torch.cat([self._batch.attention_mask[rows], torch.ones_like(first)], dim=1)
        most = max(each.max_tokens for each in self._requests) - 1
        steps = DecodeSteps(self._choose, self._take)
        given = {}
        if self._cache.decoder_calls is not None:  # or those of the newest prompt are made
            given["position_ids"] = (mask.cumsum(dim=1) - 1).clamp_min(0).to(device)
        self._model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            **given,
            **cache_argument(self._model, self._cache),
            logits_processor=[steps.processor],
            stopping_criteria=[steps.criterion],
            **generate_arguments(self._model, most, self._pad),
        )

    def _decode_verified(self, tokens: list[int], drafts: int) -> None:
        decoding = VerifiedDecoding(
            self._model, self._cache, self._batch.attention_mask[self._row_prompts()], self._rows,
            drafts=drafts, pad_token_id=self._pad, sampler=self._sampler, choose=self._choose,
            take=self._take,
        )  # fmt: skip
        self._verified = decoding.counts
        decoding.run(tokens)

    def _choose(self, logits: Tensor) -> list[int]:
        """The next token of each row; padding for those that are done."""
        live = [row for row, answer in enumerate(self._rows) if answer.finish_reason is None]
        rows = [self._rows[row].row for row in live]
        picked = logits if len(live) == len(self._rows) else logits[live]
        self._choices = dict(zip(live, self._sampler(picked, rows), strict=True))
        return [
            self._choices[row].token_id if row in self._choices else self._pad
            for row in range(len(self._rows))
        ]

    def _take(self) -> list[bool]:
        """Add what was chosen to the answers; returns which are done."""
        self._last_token_s = time.perf_counter()
        for row, choice in self._choices.items():
            answer = self._rows[row]
            self._pass_on(row, answer, answer.take(choice), is_new=True)
        if self._listeners.on_step is not None:
            self._listeners.on_step(len(self._choices))
        if self._listeners.should_stop():
            self.end()
        return [answer.finish_reason is not None for answer in self._rows]

    def _pass_on(self, number: int, answer: Answer, piece: str, *, is_new: bool = False) -> None:
        if piece and self._listeners.on_text is not None:
            self._listeners.on_text(number, piece)
        if is_new and self._listeners.on_news is not None:
            self._listeners.on_news(self._news(number, answer, piece))

    def _news(self, number: int, answer: Answer, piece: str) -> StreamedOutput:
        row = int(self._row_prompts()[number])
        request, answers = self._requests[row], self._answers[row]
        is_first = len(answer.token_ids) == 1
        return StreamedOutput(
            request_id=request.request_id, prompt=self._batch.texts[row],
            prompt_token_ids=self._batch.token_ids[row], prompt_index=request.index,
            prompt_logprobs=self._prompt_logprobs.rows[row] if is_first else None,
            outputs=[answer.news(answers.index(answer), piece)],
            finished=all(each.finish_reason is not None for each in answers),
        )  # fmt: skip


def _best(answers: Sequence[Answer], params: SamplingParams) -> list[CompletionOutput]:
    """The answers that are returned: those of the highest score where more were made."""
    if params.num_answers > params.n:
        answers = sorted(answers, key=lambda answer: answer.score, reverse=True)[: params.n]
    return [answer.output(index) for index, answer in enumerate(answers)]
