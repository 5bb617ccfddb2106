"""LLM: prompts in, answers out, over `model.generate` with a TieredCache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from penstock.core.errors import ConfigError
from penstock.core.trace import Tracer
from penstock.engine.adapter import LowRankAdapter
from penstock.engine.policy import SelectionPolicy
from penstock.generation.answer_stream import AnswerStream
from penstock.generation.batch_run import Listeners, OnText
from penstock.generation.batch_runner import BatchRunner, OnProgress
from penstock.generation.cache_choices import CacheChoices
from penstock.generation.chat_template import (
    ChatTemplate,
    ContentFormat,
    Message,
    as_conversations,
    media_of,
    template_owner,
)
from penstock.generation.default_params import default_sampling_params
from penstock.generation.engine_arguments import (
    check_arguments,
    check_generate_arguments,
    missing_attribute,
)
from penstock.generation.model_choice import chosen_model
from penstock.generation.output import RequestOutput
from penstock.generation.progress_bar import ProgressBar
from penstock.generation.prompts import (
    Prompt,
    PromptBatch,
    TextWithMedia,
    TokenIds,
    as_prompt_list,
    encode,
    make_batch,
    visuals_in,
)
from penstock.generation.requests import Batch, RequestMaker
from penstock.generation.sampler import Sampler
from penstock.generation.sampling import SamplingParams
from penstock.methods.tuned_config import TunedConfig
from penstock.models.cache_adapter import TieredCache
from penstock.models.fetch import OnBytes
from penstock.models.fingerprint import fingerprint
from penstock.models.loader import BUNDLED, CausalLM, LoadedModel, Tokenizer
from penstock.models.processing import placeholder
from penstock.storage.store import Sealing


class LLM:
    """A model with its KV cache in a fixed memory budget, under vLLM's calling conventions.

    Each call to `generate` runs its prompts as one batch through a cache of its own, sized for
    the longest prompt and `max_tokens`, and frees everything when it returns or raises. For
    several turns on one cache, or anything else that transformers can do, use `TieredCache` with
    `model.generate` itself.

    Args:
        model: "recall" (the bundled model), a model folder, a name on the Hugging Face hub, a model
            that `load` returned, or a transformers model.
        tokenizer: a name or folder, in place of the model's own; or an object, only for a
            transformers model: a tokenizer, or the processor of a model that sees. Without one,
            prompts are token ids.
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
        verify: draft so many tokens under the policy, and check them in one exact pass: the tokens
            are those of `exact`, of several at the price of one. With a seed in the settings of a
            call, or a batch of one, sampled tokens are too.
        adapter: low-rank adapter that `penstock calibrate` made, or its path; default: the
            config's, else a shipped one.
        dtype: of weights and cache, when a model is loaded here; "auto" or None as stored.
        device: where to load the model, "cpu" or "cuda".
        prefill_chunk_size: tokens per forward pass of the prompt; bounds prefill's memory. A single
            token would be a decode step, so that with 1 it is two.
        config: what `penstock tune` found, or the path of its file. Each call to `generate` takes
            the solution for its batch and length.
        seal: encrypt what the cache writes to a disk, with a key that is never written; "auto":
            where AES is fast. `RunReport.store` says which.
        max_model_len: most tokens of a prompt and its answer; default: the model's positions.
            A longer prompt is refused, an answer ends there ("length").
        quantization: "int8" or "int4": pack a model's weights so while it is loaded, as `load` does
            with its `weights`. Any other: the format of the weights, to be sure of it. None:
            whatever it is.
        revision, hf_token, offline, trust_remote_code, on_bytes: of a model that is loaded here, as
            `load` has them (`hf_token` is its `token`).
        seed: makes answers repeatable whose settings have no seed; None: torch's global generator.
        enforce_eager: record no CUDA graph.
        max_logprobs: vLLM's limit of `logprobs`; there is none here.
        generation_config: where the settings of a call without any come from: "auto": the model's
            own generation config; "vllm": the defaults of `SamplingParams`.
        left_out: other arguments of vLLM's, taken at values that change nothing, and refused at all
            others with what to take instead.

    Raises:
        ModelLoadError: the model cannot be loaded.
        UnsupportedModelError: it is no causal language model.
        ConfigError: a setting is impossible or left out, or the config cannot be read or is another
            model's; or a tokenizer object was given where the model brings one.
        AdapterError: the adapter that the config names is not beside it.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | CausalLM = BUNDLED,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        policy: str | SelectionPolicy | None = None,
        memory: int | float | str | None = "auto",
        store: str | Path = "auto",
        exact: bool = False,
        verify: int | None = None,
        adapter: str | Path | LowRankAdapter | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        prefill_chunk_size: int = 1024,
        config: TunedConfig | str | Path | None = None,
        seal: Sealing = "auto",
        max_model_len: int | None = None,
        quantization: str | None = None,
        revision: str | None = None,
        hf_token: str | bool | None = None,
        offline: bool | None = None,
        trust_remote_code: bool = False,
        on_bytes: OnBytes | None = None,
        seed: int | None = None,
        enforce_eager: bool = False,
        max_logprobs: int | None = None,
        generation_config: Literal["auto", "vllm"] = "auto",
        **left_out: Any,
    ) -> None:
        del max_logprobs
        check_arguments(left_out)
        if prefill_chunk_size < 1:
            raise ConfigError(f"prefill_chunk_size={prefill_chunk_size} must be at least 1")
        if verify is not None and (verify < 1 or exact):
            raise ConfigError(
                f"{verify=} must be at least 1 token, without exact: exact checks nothing"
            )
        if generation_config not in ("auto", "vllm"):
            raise ConfigError(f"generation_config={generation_config!r} is neither auto nor vllm")
        choices = CacheChoices.of(
            policy=policy, memory=memory, store=store, adapter=adapter, config=config
        )
        self._loaded = chosen_model(
            model, tokenizer, dtype=dtype, device=device, quantization=quantization,
            revision=revision, hf_token=hf_token, offline=offline,
            trust_remote_code=trust_remote_code, on_bytes=on_bytes,
        )  # fmt: skip
        if choices.config is not None:
            choices.config.check(fingerprint(self.model), self._loaded.name)
        self._requests = RequestMaker.of(self._loaded, max_model_len)
        self._runner = BatchRunner(
            loaded=self._loaded, choices=choices, exact=exact, seal=seal, graphs=not enforce_eager,
            chunk=max(2, prefill_chunk_size),
            sampler=Sampler.seeded(SamplingParams(seed=seed).seed, self.model), verify=verify,
        )  # fmt: skip
        self._has_own_defaults = generation_config == "auto"

    if not TYPE_CHECKING:  # which would take any name then

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(name)

    @property
    def model(self) -> CausalLM:
        """The transformers model, unmodified."""
        return self._loaded.model

    @property
    def loaded(self) -> LoadedModel:
        """The model with its tokenizer, and its processor if it sees."""
        return self._loaded

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that encodes prompts and decodes answers."""
        return self._loaded.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ConfigError: the model came without one.
        """
        if self.tokenizer is None:
            raise ConfigError(f"{self._loaded.name} came without a tokenizer; give LLM tokenizer=")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The settings of a call that gives none: those of the model's own generation config, as
        far as it has any, unless `generation_config` is "vllm"."""
        return default_sampling_params(self.model) if self._has_own_defaults else SamplingParams()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        on_text: OnText | None = None,
        on_progress: OnProgress | None = None,
        on_index: Callable[[float], None] | None = None,
        tracer: Tracer | None = None,
        **left_out: Any,
    ) -> list[RequestOutput]:
        """Answer prompts, all in one batch where the model's positions hold it.

        Args:
            prompts: one prompt or a list of prompts, each a text, token ids, a dict with `prompt`
                or `prompt_token_ids`, or what a tokenizer made of a text, or of several. For a
                model that sees: a dict with `prompt` and `multi_modal_data`, or what its processor
                made of one prompt.
            sampling_params: one for all prompts, or one for each; None:
                `get_default_sampling_params`.
            use_tqdm: show a progress bar on stderr, where that is a terminal and no callback was
                given; or what is called as tqdm is, to make one anywhere.
            on_text: called with each piece of an answer as soon as it is known.
            on_progress: called after each chunk of prefill.
            on_index: called with the share of the prompt's index that is made, from 0 to 1, by
                policies that make one when the whole prompt is in (clusters, codes).
            tracer: collects spans of compute and I/O.
            left_out: other arguments of vLLM's; refused but for None.

        Returns:
            One for each prompt, in their order.

        Raises:
            PromptError: a prompt is empty or does not fit the model.
            ConfigError: the prompts are longer or more than what the config was tuned for, or
                the settings are something else, more or fewer than prompts, or impossible.
            BudgetError: `memory` is too small for these prompts; says how much would do.
            UnsupportedModelError: the model's attention cannot work with a tiered cache.
            StorageError: the store cannot be used, is full, or failed.
        """
        check_generate_arguments("generate", left_out)
        has_callback = not (on_text is None and on_progress is None)
        bar = ProgressBar(False if has_callback else use_tqdm)
        if bar.is_shown:
            on_progress = bar.on_prefill
        try:
            params = self._requests.params_of(sampling_params, self.get_default_sampling_params)
            batches = self._requests.batches(prompts, params)
            on_step = bar.counting(sum(batch.most_new_tokens for batch in batches))
            return self._runner.run_all(
                batches, Listeners(on_text=on_text, on_step=on_step), on_progress=on_progress,
                on_index=on_index, tracer=tracer,
            )  # fmt: skip
        finally:
            bar.close()

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: OnProgress | None = None,
        **left_out: Any,
    ) -> AnswerStream:
        """Answer prompts, and yield what is new of each answer with every token.

            with llm.stream("The sky is", SamplingParams(max_tokens=64)) as stream:
                for news in stream:
                    print(news.text, end="", flush=True)

        The answers are made by a thread, whether they are read or not.

        Args:
            prompts, sampling_params, on_progress: as for `generate`; `on_progress` is called in
                that thread.

        Returns:
            An iterator. `text` and `token_ids` of what it yields are new; several prompts or
            answers come between each other, told apart by `prompt_index` and `outputs[0].index`.

        Raises:
            ConfigError: `best_of` is more than `n`: the best are known at the end.
            As for `generate`: settings and prompts at once, others from the iterator.
        """
        check_generate_arguments("stream", left_out)
        params = self._requests.params_of(sampling_params, self.get_default_sampling_params)
        for each in [params] if isinstance(params, SamplingParams) else params:
            if each.num_answers > each.n:
                raise ConfigError("best_of cannot be streamed: which are best is known at the end")
        batches = self._requests.batches(prompts, params)

        def run(on_news: Any, check: Callable[[], None]) -> list[RequestOutput]:
            def progress(done: int, total: int) -> None:
                check()
                if on_progress is not None:
                    on_progress(done, total)

            listeners = Listeners(on_news=on_news, on_step=lambda count: check())
            return self._runner.run_all(batches, listeners, on_progress=progress)

        return AnswerStream(run)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
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
                a text or a list of parts: {"type": "text", "text": ...}, {"type": "image", "image":
                ...} and {"type": "video", "video": ...} (or "path", or OpenAI's image_url, of a
                file or with its bytes), for a model that sees.
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
        template = ChatTemplate(
            text=chat_template, content_format=chat_template_content_format, tools=tools,
            kwargs=chat_template_kwargs or {},
        )  # fmt: skip
        ids = [
            self._encode_messages(
                conversation, template, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for conversation in as_conversations(messages)
        ]  # fmt: skip
        return self.generate(ids, sampling_params, use_tqdm=use_tqdm, **options)

    def _encode_messages(
        self, messages: Sequence[Message], template: ChatTemplate, **options: bool
    ) -> TokenIds:
        media = media_of(messages)
        if media:
            placeholder(self._loaded, media[0].kind)  # or the model takes none
        text = template.render(template_owner(self._loaded), messages, **options)
        ids = encode(self._loaded, TextWithMedia.of(text, media), alone=False)
        return TokenIds(ids, text, visuals_in(ids))

    def batch_of(self, prompts: Sequence[Prompt], params: SamplingParams) -> PromptBatch:
        """Encode prompts as one batch, for `answer`.

        Raises:
            PromptError: a prompt is empty or does not fit the model.
            ConfigError: `params` have stop strings, and there is no tokenizer.
        """
        self._requests.check(params)
        return make_batch(
            self._loaded, as_prompt_list(prompts), new_tokens=params.max_tokens or 1,
            pad_token_id=self._requests.pad_token_id,
        )  # fmt: skip

    def batches(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Batch]:
        """Encode prompts and check everything that can be, for `runner_with`.

        Raises:
            PromptError: a prompt is empty, or too long to be answered.
            ConfigError: the settings are impossible.
        """
        return self._requests.batches(prompts, params.clone())

    def runner_with(self, *, chunk: int) -> BatchRunner:
        """What runs batches as `generate` does, with other chunks of prompts."""
        return replace(self._runner, chunk=max(2, chunk))

    def answer(
        self, batch: PromptBatch, params: SamplingParams, cache: TieredCache, *,
        on_text: OnText | None = None, notices: tuple[str, ...] = (), recomputed_tokens: int = 0,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer a batch with a cache that is the caller's; it may hold the prompts' first tokens.

        Args:
            cache: with room for the prompts and their answers; stays open. With `n` answers it has
                as many rows of each prompt afterwards.
            notices: for the report.
            recomputed_tokens: of what the cache holds, for the report.
            should_stop: asked behind each token; true ends the answers ("abort"). The cache holds
                all of them but their last tokens.

        Raises:
            ConfigError: logprobs of a prompt are asked for whose tokens the cache holds already.
            StorageError: the store is full, or failed.
        """
        params = params.clone()
        if params.prompt_logprobs is not None and cache.get_seq_length():
            raise ConfigError(
                "prompt_logprobs needs the prompt to be read, and its KV is stored; set it to None"
            )
        most = params.max_tokens or cache.max_tokens - batch.padded_tokens
        requests = self._requests.of_batch(batch, params, most)
        listeners = Listeners(on_text=on_text, should_stop=should_stop)
        return self._runner.answer(
            Batch(batch, requests), cache, listeners, notices=notices, recomputed=recomputed_tokens
        )
