"""Requests: the prompts of a call beside their settings, checked, and put into batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from penstock.core.errors import ConfigError, PromptError
from penstock.generation.batch_run import Request
from penstock.generation.decoding import end_tokens, padding_token, vocabulary_size
from penstock.generation.prompts import (
    Prompt,
    PromptBatch,
    as_prompt_list,
    check_prompt,
    encode,
    padded,
    text_in,
    visuals_in,
)
from penstock.generation.sampling import SamplingParams
from penstock.models.loader import LoadedModel
from penstock.models.model_shape import inspect_model


class _Prompt(NamedTuple):
    text: str | None
    token_ids: list[int]
    request: Request


class Batch(NamedTuple):
    """Prompts that run together."""

    prompts: PromptBatch
    requests: list[Request]

    @property
    def num_answers(self) -> int:
        """Rows that its cache gets."""
        return sum(request.params.num_answers for request in self.requests)

    @property
    def most_tokens(self) -> int:
        """Of a row: padding, prompt and answer."""
        return self.prompts.padded_tokens + max(each.max_tokens for each in self.requests)

    @property
    def most_new_tokens(self) -> int:
        """Of all answers."""
        return sum(each.params.num_answers * each.max_tokens for each in self.requests)


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes batches of the prompts of calls, and numbers them over all calls."""

    loaded: LoadedModel
    max_model_len: int | None = None
    _ids: Iterator[int] = field(default_factory=count)

    @classmethod
    def of(cls, loaded: LoadedModel, max_model_len: int | None) -> "RequestMaker":
        """Check the limit.

        Raises:
            ConfigError: it is less than a prompt and an answer of one token each, or more than the
                model has positions.
        """
        if max_model_len is not None:
            positions = inspect_model(loaded.model).max_positions
            if not 2 <= max_model_len <= positions:
                raise ConfigError(
                    f"max_model_len={max_model_len} must lie in 2 to {positions:,}, the positions "
                    f"of {loaded.name}"
                )
        return cls(loaded, max_model_len)

    @property
    def most_tokens(self) -> int:
        """Of a prompt and an answer."""
        positions = inspect_model(self.loaded.model).max_positions
        return positions if self.max_model_len is None else self.max_model_len

    def params_of(
        self, given: SamplingParams | Sequence[SamplingParams] | None,
        default: Callable[[], SamplingParams],
    ) -> SamplingParams | list[SamplingParams]:  # fmt: skip
        """Copies that are checked: fields may have been assigned since, and may be again.

        Raises:
            ConfigError: something else was given, or a field is out of its range.
        """
        if given is None:
            return default()
        if isinstance(given, SamplingParams):
            return given.clone()
        several = list(given) if isinstance(given, Sequence) else [given]
        for each in several:
            if not isinstance(each, SamplingParams):
                raise ConfigError(
                    f"sampling_params is a {type(each).__name__}; give SamplingParams, one for all "
                    "prompts or a list with one for each"
                )
        return [each.clone() for each in several]

    def batches(
        self, prompts: Prompt | Sequence[Prompt], params: Sequence[SamplingParams] | SamplingParams
    ) -> list[Batch]:
        """Encode prompts and check everything that can be, before any runs.

        Prompts of very different lengths come in several batches, where a row of padding, prompt
        and answer would be longer than the model's positions.

        Raises:
            PromptError: a prompt is empty, or too long to be answered.
            ConfigError: settings are more or fewer than prompts, or the model cannot do them.
        """
        items = as_prompt_list(prompts)
        several = [params] * len(items) if isinstance(params, SamplingParams) else list(params)
        if len(several) != len(items):
            raise ConfigError(
                f"there are {len(items)} prompts and {len(several)} sampling_params; give one for "
                "each, or one for all"
            )
        made = [
            self._made(number, "the prompt" if len(items) == 1 else f"prompt {number}", *each)
            for number, each in enumerate(zip(items, several, strict=True))
        ]
        pad = self.pad_token_id
        return [
            Batch(
                padded([each.text for each in group], [each.token_ids for each in group], pad),
                [each.request for each in group],
            )
            for group in self._groups(made)
        ]

    @property
    def pad_token_id(self) -> int:
        """Fills short rows."""
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        return padding_token(model, end_tokens(model, tokenizer))

    def of_batch(
        self, batch: PromptBatch, params: SamplingParams, max_tokens: int
    ) -> list[Request]:
        """Requests of prompts that are a batch already, all with the same settings."""
        return [
            Request(
                request_id=str(next(self._ids)), index=row, params=params, max_tokens=max_tokens
            )
            for row in range(len(batch.token_ids))
        ]

    def check(self, params: SamplingParams) -> None:
        """Refuse settings that the model, or the lack of a tokenizer, makes impossible.

        Raises:
            ConfigError: names the setting.
        """
        if self.loaded.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise ConfigError(f"{name} needs a tokenizer to know the text of an answer")
        params.check_vocabulary(vocabulary_size(self.loaded.model))

    def _made(
        self, number: int, which: str, prompt: str | Sequence[int], params: SamplingParams
    ) -> _Prompt:
        self.check(params)
        ids = encode(self.loaded, prompt, what=which)
        kept = params.truncate_prompt_tokens
        if kept is not None:
            if visuals_in(ids):
                raise PromptError("truncate_prompt_tokens would cut pictures; leave it out")
            ids = ids[-(kept if kept > 0 else self.most_tokens - 1) :]
        check_prompt(self.loaded, which, ids, new_tokens=1, most_tokens=self.max_model_len)
        room = self.most_tokens - len(ids)
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        request = Request(
            request_id=str(next(self._ids)), index=number, params=params, max_tokens=most
        )
        return _Prompt(text_in(prompt), ids, request)

    def _groups(self, made: Sequence[_Prompt]) -> Iterator[list[_Prompt]]:
        group: list[_Prompt] = []
        longest = answer = 0
        for each in made:
            longest = max(longest, len(each.token_ids))
            answer = max(answer, each.request.max_tokens)
            if group and longest + answer > self.most_tokens:
                yield group
                group, longest, answer = [], len(each.token_ids), each.request.max_tokens
            group.append(each)
        yield group
