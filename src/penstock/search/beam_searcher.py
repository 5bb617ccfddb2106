"""BeamSearcher: step-wise beam search on any model, with its beams in a memory budget."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError, PromptError
from penstock.generation.prompts import Prompt, make_batch, single_prompt
from penstock.generation.token_text import own_stop_texts
from penstock.models.beam_decoder import ModelBeamDecoder, make_decoder
from penstock.models.loader import (
    BUNDLED,
    CausalLM,
    LoadedModel,
    Tokenizer,
    check_own_tokenizer,
    load,
)
from penstock.models.model_shape import inspect_model
from penstock.search.beam_search import BeamSearch, OnGroup, OnPrefill, OnStep
from penstock.search.search_params import SearchParams, check_step
from penstock.search.search_tree import SearchOutput, SearchPlace
from penstock.search.step_scorer import StepScorer, as_scorer, needs_text
from penstock.search.step_texts import StepTexts


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchMemory:
    """Where the beams' keys and values lie, and how they are moved."""

    memory: int | float | str | None = "auto"
    """Fast memory: bytes, "1GiB", a fraction of what all beams take ("1/4"), "auto", or None for
    as much as they take."""
    store: str | Path = "auto"
    """The slow tier: "auto", a folder, "memory", or a simulated device."""
    strategy: str = "scheduled"
    """"scheduled", "resident" (everything in fast memory) or "layerwise" (token by token)."""
    overlap: bool = True
    """Group beams by the blocks that they share."""
    balance: bool = True
    """Groups of about the same size, in the least number of rounds."""
    prefetch: bool = True
    """Load for the next group while one runs."""
    share: bool = True
    """One slot, and one pass of attention, for a block that several beams share."""
    block_tokens: int = 16
    """Tokens of a block, the unit of forks and of transfers."""


class BeamSearcher:
    """A model that answers a prompt by searching.

    Args:
        model: "recall" (the bundled model), a model folder, a model that `load` returned, or a
            transformers model.
        tokenizer: only for a transformers model; without one, prompts are token ids and the
            scorer has no texts.
        scorer: rates the candidates: a `StepScorer`, a function over texts, or a name that
            `load_scorer` takes.
        memory: where keys and values lie.
        dtype: of weights and cache, when a model is loaded here; None as stored.
        device: where to load the model, "cpu" or "cuda".

    Raises:
        ModelLoadError: the model, or the reward model, cannot be loaded.
        UnsupportedModelError: it is no causal language model.
        ConfigError: a setting is impossible, or a tokenizer was given where the model brings one.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | CausalLM = BUNDLED,
        *,
        tokenizer: Tokenizer | None = None,
        scorer: StepScorer | Callable[..., Any] | str = "logprob",
        memory: SearchMemory = SearchMemory(),
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._scorer = as_scorer(scorer)
        check_own_tokenizer(model, tokenizer)
        if isinstance(model, LoadedModel):
            self._loaded = model
        elif isinstance(model, str | Path):
            self._loaded = load(model, dtype=dtype, device=device)
        else:
            name = model.name_or_path or type(model).__name__
            self._loaded = LoadedModel(model=model, tokenizer=tokenizer, name=name)
        self._memory = memory
        self._search: BeamSearch | None = None
        self._decoder: ModelBeamDecoder | None = None
        self._place: SearchPlace | None = None

    @property
    def so_far(self) -> SearchOutput | None:
        """Of the newest search, also of one that raised or was interrupted; None before any."""
        if self._search is None:
            return None
        return replace(self._search.so_far(), place=self.place)

    @property
    def place(self) -> SearchPlace | None:
        """Where the newest search's beams lie now, or lay at its end; None before any."""
        decoder = self._decoder
        if decoder is None:
            return self._place
        return SearchPlace(
            strategy=self._memory.strategy, memory=decoder.report(),
            store=decoder.store_description, simulated=decoder.simulated,
            notices=tuple(decoder.notices),
        )  # fmt: skip

    def search(
        self,
        prompt: Prompt,
        params: SearchParams | None = None,
        *,
        on_step: OnStep | None = None,
        on_group: OnGroup | None = None,
        on_prefill: OnPrefill | None = None,
    ) -> SearchOutput:
        """Answer one prompt.

        Args:
            prompt: text, or token ids.
            params: None for the defaults of `SearchParams`.
            on_step: called after each step with its candidates.
            on_group: called after each group of a step.
            on_prefill: called with the prompt's tokens done and in all.

        Returns:
            The beams, best first, and the record of the search.

        Raises:
            PromptError: the prompt is empty, does not fit the model, or has pictures.
            ConfigError: a step is longer than the context, or a setting needs a tokenizer.
            BudgetError: `memory` is too small for one beam; says how much would do.
            VerifierError: the scorer failed.
            StorageError: the slow tier cannot be used, is full, or failed.
        """
        params = SearchParams() if params is None else params
        self._search = self._place = None
        self._check_texts(params)
        # At a delimiter, beams reach their limit at different tokens; the first goes along with
        # its group, without effect, one token behind its end.
        ragged = params.delimiter is not None
        new_tokens = params.max_new_tokens + ragged
        batch = make_batch(
            self._loaded, [single_prompt(prompt)], new_tokens=new_tokens, pad_token_id=0
        )
        if batch.visuals:
            raise PromptError(
                "a search reads texts alone, as its beams know no positions of pictures; take "
                "LLM.generate"
            )
        [token_ids] = batch.token_ids
        check_step(len(token_ids), params, inspect_model(self._loaded.model).max_positions)
        stops, ends = params.stop_texts, frozenset[int]()
        if not params.ignore_end:
            stops, ends = (*stops, *self._own_stop_texts()), self._end_token_ids()
        texts = StepTexts(
            self._loaded.tokenizer,
            delimiter=params.delimiter,
            stop_texts=stops,
            end_token_ids=ends,
        )
        text = batch.texts[0] if batch.texts[0] is not None else texts.decode(token_ids)
        beyond = params.step_tokens - 1 if ragged else 0
        decoder = self._make_decoder(params, len(token_ids) + params.max_new_tokens + beyond)
        self._decoder = decoder
        try:
            self._search = BeamSearch(
                decoder, params, self._scorer, texts, on_step=on_step, on_group=on_group
            )
            output = self._search.run(token_ids, text, on_prefill=on_prefill)
            return replace(output, place=self.place)
        finally:
            try:
                self._place = self.place
            finally:
                self._decoder = None
                decoder.close()

    def _make_decoder(self, params: SearchParams, max_tokens: int) -> ModelBeamDecoder:
        where = self._memory
        return make_decoder(
            self._loaded.model, beams=params.beams, width=params.width, max_tokens=max_tokens,
            memory=where.memory, store=where.store, strategy=where.strategy,
            overlap=where.overlap, balance=where.balance, prefetch=where.prefetch,
            share=where.share, block_tokens=where.block_tokens,
        )  # fmt: skip

    def _check_texts(self, params: SearchParams) -> None:
        if self._loaded.tokenizer is not None:
            return
        wants = {
            "a delimiter": params.delimiter is not None,
            "stop": bool(params.stop_texts),
            f"scorer {self._scorer.name}": needs_text(self._scorer),
        }
        if any(wants.values()):
            what = next(name for name, wanted in wants.items() if wanted)
            raise ConfigError(f"{what} needs a tokenizer to know the text of a beam")

    def _own_stop_texts(self) -> tuple[str, ...]:
        return () if self._loaded.tokenizer is None else own_stop_texts(self._loaded.model)

    def _end_token_ids(self) -> frozenset[int]:
        config: Any = self._loaded.model.generation_config
        ends = config.eos_token_id
        if ends is None and self._loaded.tokenizer is not None:
            ends = self._loaded.tokenizer.eos_token_id
        return frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
