"""LLM: prompts in, answers out, over `model.generate` with a TieredCache."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.core.trace import Tracer
from penstock.engine.policy import SelectionPolicy
from penstock.generation.answer_watch import AnswerWatch, OnText
from penstock.generation.cache_choices import CacheChoices
from penstock.generation.chat_template import ChatTemplate, ContentFormat, Message, as_conversations
from penstock.generation.chunked_prefill import read_ahead
from penstock.generation.output import RequestOutput, RunReport
from penstock.generation.prompts import Prompt, PromptBatch, as_prompt_list, encode, make_batch
from penstock.generation.sampling import SamplingParams
from penstock.generation.seeded import Seeded
from penstock.generation.token_text import own_stop_texts
from penstock.methods.tuned_config import TunedConfig
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.fetch import OnBytes
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import (
    BUNDLED,
    CausalLM,
    LoadedModel,
    Tokenizer,
    check_own_tokenizer,
    load,
)
from penstock.storage.store import Sealing

OnProgress = Callable[[int, int], None]
"""Called after each prefill chunk with the tokens done and the tokens in all, padding counted."""

_OURS = ("cache_implementation", "stop_strings", "prompt_lookup_num_tokens")
"""Of a model's own generation config: the cache is ours, and `AnswerWatch` knows the strings and
takes one token a step (looking ahead gives several, the same ones). What is None in a config of a
call is taken from the model's, unless it is an argument too."""


class LLM:
    """A model with its KV cache in a fixed memory budget, under vLLM's calling conventions.

    Each call to `generate` runs its prompts as one batch through a cache of its own, sized for
    the longest prompt and `max_tokens`, and frees everything when it returns or raises. For
    several turns on one cache, or anything else that transformers can do, use `TieredCache` with
    `model.generate` itself.

    Args:
        model: "recall" (the bundled model), a model folder, a name on the Hugging Face hub, a model
            that `load` returned, or a transformers model.
        tokenizer: only for a transformers model; without one, prompts are token ids.
        policy: a name of `penstock.POLICIES` or a policy object; None for the config's pick, or
            "kvswap" without a config. With a config, a name means that policy's own solution there,
            and "auto" is the pick.
        memory: fast memory for the cache: bytes, "512MiB", a fraction of the full cache ("1/13"),
            "auto", or None for as much as the full cache takes. With a config, "auto" is the
            config's budget for the batch.
        store: where the cache lies: "auto", a folder, "memory", or a simulated device. With a
            config, "auto" is the disk that it was tuned for.
        exact: attend to the whole past, streamed from the store; the tokens are those of the
            plain model at any budget.
        adapter: path of a low-rank adapter that `penstock calibrate` made; default: the config's,
            else a shipped one.
        dtype: of weights and cache, when a model is loaded here; None as stored.
        device: where to load the model, "cpu" or "cuda".
        revision, hf_token, offline, trust_remote_code, on_bytes: of a model that is loaded here, as
            `load` has them (`hf_token` is its `token`).
        prefill_chunk_size: tokens per forward pass of the prompt; bounds prefill's memory. A single
            token would be a decode step, so that with 1 it is two.
        config: what `penstock tune` found, or the path of its file. Each call to `generate` takes
            the solution for its batch and length.
        seal: encrypt what the cache writes to a disk, with a key that is never written; "auto":
            where AES is fast. `RunReport.store` says which.

    Raises:
        ModelLoadError: the model cannot be loaded.
        UnsupportedModelError: it is no causal language model.
        ConfigError: a setting is impossible, or the config cannot be read or is another model's;
            or a tokenizer was given where the model brings one.
        AdapterError: the adapter that the config names is not beside it.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | CausalLM = BUNDLED,
        *,
        tokenizer: Tokenizer | None = None,
        policy: str | SelectionPolicy | None = None,
        memory: int | float | str | None = "auto",
        store: str | Path = "auto",
        exact: bool = False,
        adapter: str | Path | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        hf_token: str | bool | None = None,
        offline: bool | None = None,
        trust_remote_code: bool = False,
        on_bytes: OnBytes | None = None,
        prefill_chunk_size: int = 1024,
        config: TunedConfig | str | Path | None = None,
        seal: Sealing = "auto",
    ) -> None:
        if prefill_chunk_size < 1:
            raise ConfigError(f"prefill_chunk_size={prefill_chunk_size} must be at least 1")
        self._choices = CacheChoices.of(
            policy=policy, memory=memory, store=store, adapter=adapter, config=config
        )
        check_own_tokenizer(model, tokenizer)
        if isinstance(model, LoadedModel):
            self._loaded = model
        elif isinstance(model, str | Path):
            self._loaded = load(
                model, dtype=dtype, device=device, revision=revision, token=hf_token,
                offline=offline, trust_remote_code=trust_remote_code, on_bytes=on_bytes,
            )  # fmt: skip
        else:
            name = model.name_or_path or type(model).__name__
            self._loaded = LoadedModel(model=model, tokenizer=tokenizer, name=name)
        if self._choices.config is not None:
            self._choices.config.check(fingerprint(self.model), self._loaded.name)
        self._exact, self._seal = exact, seal
        self._prefill_chunk_size = max(2, prefill_chunk_size)

    @property
    def model(self) -> CausalLM:
        """The transformers model, unmodified."""
        return self._loaded.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that encodes prompts and decodes answers."""
        return self._loaded.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        on_text: OnText | None = None,
        on_progress: OnProgress | None = None,
        on_index: Callable[[float], None] | None = None,
        tracer: Tracer | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all in one batch.

        Args:
            prompts: one text, one list of token ids, or a list of these.
            sampling_params: None for the defaults of `SamplingParams`.
            on_text: called with each piece of an answer as soon as it is known.
            on_progress: called after each chunk of prefill.
            on_index: called with the share of the prompt's index that is made, from 0 to 1, by
                policies that make one when the whole prompt is in (clusters, codes).
            tracer: collects spans of compute and I/O.

        Returns:
            One answer per prompt, in their order.

        Raises:
            PromptError: a prompt is empty or does not fit the model.
            ConfigError: the prompts are longer or more than what the config was tuned for, or
                `sampling_params` is something else.
            BudgetError: `memory` is too small for these prompts; says how much would do.
            UnsupportedModelError: the model's attention cannot work with a tiered cache.
            StorageError: the store cannot be used, is full, or failed.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ConfigError(
                f"sampling_params is a {type(params).__name__}; give one SamplingParams for all "
                "prompts"
            )
        batch = self.batch_of(as_prompt_list(prompts), params)
        total, most = batch.padded_tokens, batch.padded_tokens + params.max_tokens
        choices = self._choices.for_batch(len(batch.token_ids), most)
        cache = TieredCache(
            self.model,
            policy=choices.policy,
            memory=choices.memory,
            store=choices.store,
            max_tokens=most,
            batch_size=len(batch.token_ids),
            exact=self._exact,
            sealed=self._seal,
            adapter=choices.adapter,
            tracer=tracer,
            progress=None if on_progress is None else lambda done: on_progress(done, total),
            prompt_tokens=total,
            index_progress=on_index,
        )
        with cache:
            return self.answer(batch, params, cache, on_text=on_text, notices=choices.notices)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        use_tqdm: bool = False,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, put into words by the model's chat template.

            llm.chat([{"role": "user", "content": "What is the capital of France?"}])

        For several turns on one cache, use `Conversation`.

        Args:
            messages: one conversation, or a list of them: dicts with a role and a content, which is
                a text or a list of parts of type text.
            sampling_params, use_tqdm: as for `generate`.
            chat_template: a Jinja template in place of the tokenizer's own.
            chat_template_content_format: whether the template gets a content as one "string" or as
                a list of parts ("openai"); "auto" finds out.
            add_generation_prompt: begin the model's turn.
            continue_final_message: let the model go on with the last message, without
                `add_generation_prompt`.
            tools: JSON schemas of functions that the model may call.
            chat_template_kwargs: more variables of the template, such as `enable_thinking`.
            lora_request, mm_processor_kwargs: vLLM's; refused.
            options: as for `generate`.

        Returns:
            One answer per conversation, in their order; `prompt` is the text of the template.

        Raises:
            ConfigError: there is no chat template, or an argument that cannot be.
            PromptError: a message is none, or the template refuses a conversation.
            As for `generate`.
        """
        refused = {"lora_request": lora_request, "mm_processor_kwargs": mm_processor_kwargs}
        for name, value in refused.items():
            if value is not None:
                raise ConfigError(f"{name} is not supported by LLM.chat; leave it out")
        if use_tqdm:
            options["use_tqdm"] = use_tqdm
        template = ChatTemplate(
            text=chat_template, content_format=chat_template_content_format, tools=tools,
            kwargs=chat_template_kwargs or {},
        )  # fmt: skip
        prompts = [
            template.render(
                self.tokenizer, conversation, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for conversation in as_conversations(messages)
        ]  # fmt: skip
        ids = [encode(self._loaded, prompt, alone=False) for prompt in prompts]
        outputs = self.generate(ids, sampling_params, **options)
        return [replace(each, prompt=text) for each, text in zip(outputs, prompts, strict=True)]

    def batch_of(self, prompts: Sequence[Prompt], params: SamplingParams) -> PromptBatch:
        """Encode prompts as one batch.

        Raises:
            PromptError: a prompt is empty or does not fit the model.
            ConfigError: `params` have stop strings, and there is no tokenizer.
        """
        if params.stop_texts and self.tokenizer is None:
            raise ConfigError("stop needs a tokenizer to know the text of an answer")
        config, _ = self._generation_config(params)
        return make_batch(
            self._loaded, prompts, new_tokens=params.max_tokens, pad_token_id=config.pad_token_id
        )

    def answer(
        self, batch: PromptBatch, params: SamplingParams, cache: TieredCache, *,
        on_text: OnText | None = None, notices: tuple[str, ...] = (), recomputed_tokens: int = 0,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer a batch with a cache that is the caller's; it may hold the prompts' first tokens.

        Args:
            cache: with room for the prompts and their answers; stays open.
            notices: for the report.
            recomputed_tokens: of what the cache holds, for the report.
            should_stop: asked behind each token; true ends the answers ("abort"). The cache holds
                all of them but their last tokens.

        Raises:
            StorageError: the store is full, or failed.
        """
        config, end_token_ids = self._generation_config(params)
        params = self._with_own_stops(params)
        watch = AnswerWatch(
            self.tokenizer, params, num_rows=len(batch.token_ids), end_token_ids=end_token_ids,
            on_text=on_text, should_stop=should_stop,
        )  # fmt: skip
        started_s, held = time.perf_counter(), cache.get_seq_length()
        self._run(batch, params, config, watch, cache)
        watch.end()
        report = self._report(batch, watch, cache, started_s, notices)
        report = replace(
            report, restored_tokens=held - recomputed_tokens, recomputed_tokens=recomputed_tokens
        )
        return _outputs(batch, watch, report)

    def _run(
        self,
        batch: PromptBatch,
        params: SamplingParams,
        config: Any,
        watch: AnswerWatch,
        cache: TieredCache,
    ) -> None:
        model: Any = self.model
        read_ahead(self.model, cache, batch, self._prefill_chunk_size)
        model.generate(
            input_ids=batch.input_ids.to(model.device),
            attention_mask=batch.attention_mask.to(model.device),
            **cache_argument(model, cache),
            generation_config=config,
            logits_processor=[] if params.seed is None else [Seeded(params.seed, model.device)],
            stopping_criteria=[watch],
            **{name: None for name in _OURS if getattr(model.generation_config, name, None)},
        )

    def _generation_config(self, params: SamplingParams) -> tuple[Any, frozenset[int]]:
        """The model's own generation config with `params` in it, and the ids that end an answer."""
        config: Any = copy.deepcopy(self.model.generation_config)
        ends = config.eos_token_id
        if ends is None and self.tokenizer is not None:
            ends = self.tokenizer.eos_token_id
        end_token_ids = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        config.eos_token_id = sorted(end_token_ids) or None
        # It fills short rows and those that are done; what it is changes nothing, but some models
        # name one that they do not have (-1, or the first behind their vocabulary).
        known = range(int(self.model.get_input_embeddings().weight.shape[0]))
        wanted = (config.pad_token_id, *sorted(end_token_ids))
        config.pad_token_id = next((each for each in wanted if each in known), 0)
        config.max_length = None
        config.max_new_tokens = params.max_tokens
        config.num_beams = 1
        config.num_return_sequences = 1
        config.return_dict_in_generate = False
        config.use_cache = True
        config.cache_implementation = None
        config.prefill_chunk_size = None  # the prompt is read before, see `read_ahead`
        config.do_sample = not params.is_greedy
        config.temperature = None if params.is_greedy else params.temperature
        config.top_p = None if params.is_greedy else params.top_p
        config.top_k = None if params.is_greedy else max(params.top_k, 0)
        return config, end_token_ids

    def _with_own_stops(self, params: SamplingParams) -> SamplingParams:
        """With the strings that end an answer by the model's own generation config."""
        if self.tokenizer is None:
            return params
        return replace(params, stop=(*params.stop_texts, *own_stop_texts(self.model)))

    def _report(
        self,
        batch: PromptBatch,
        watch: AnswerWatch,
        cache: TieredCache,
        started_s: float,
        notices: tuple[str, ...],
    ) -> RunReport:
        new_tokens = sum(len(ids) for ids in watch.token_ids)
        return RunReport(
            policy=cache.policy.name,
            exact=cache._config.exact,
            prompt_tokens=sum(len(ids) for ids in batch.token_ids),
            new_tokens=new_tokens,
            prefill_s=watch.first_token_s - started_s,
            decode_s=watch.last_token_s - watch.first_token_s,
            decode_tokens=new_tokens - len(watch.token_ids),
            stats=cache.stats,
            memory=cache.report(),
            store=cache.store_description,
            simulated=cache.simulated,
            notices=(*notices, *cache.notices),
        )


def _outputs(batch: PromptBatch, watch: AnswerWatch, report: RunReport) -> list[RequestOutput]:
    return [
        RequestOutput(
            prompt=batch.texts[row],
            prompt_token_ids=batch.token_ids[row],
            text=watch.text(row),
            token_ids=watch.token_ids[row],
            finish_reason=watch.finish_reasons[row] or "length",
            run=report,
        )
        for row in range(len(batch.token_ids))
    ]
