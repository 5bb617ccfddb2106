"""Arguments of vLLM's LLM that Penstock leaves out, each with what to take instead."""

from collections.abc import Mapping
from typing import Any

from penstock.generation.sampling_fields import LeftOut, refuse

_ONE_PROCESS = "a model runs in one process"
_TEXT_ALONE = "pictures are prepared as the model's processor says"
_BATCHES = "a call's prompts run as one batch; memory= bounds its cache"

LEFT_OUT_ARGUMENTS: Mapping[str, LeftOut] = {
    "gpu_memory_utilization": LeftOut("memory= bounds the cache", (None, 0.9, 0.92)),
    "kv_cache_memory_bytes": LeftOut("memory= bounds the cache"),
    "swap_space": LeftOut("store= says where the cache lies", (None, 4, 4.0, 0, 0.0)),
    "cpu_offload_gb": LeftOut("weights stay on device=", (None, 0, 0.0)),
    "kv_cache_dtype": LeftOut("the cache has the model's dtype", (None, "auto")),
    "calculate_kv_scales": LeftOut("the cache has the model's dtype", (None, False)),
    "block_size": LeftOut("a policy object names the size of its units"),
    "enable_prefix_caching": LeftOut("a Document keeps the KV of a text", (None, False)),
    "enable_chunked_prefill": LeftOut("prefill is always chunked", (None, True)),
    "max_num_batched_tokens": LeftOut("prefill_chunk_size= is the tokens of a forward pass"),
    "max_num_seqs": LeftOut(_BATCHES, (None, 256)),
    "scheduling_policy": LeftOut(_BATCHES, (None, "fcfs")),
    "max_seq_len_to_capture": LeftOut("enforce_eager=True records no graph", (None, 8192)),
    "tensor_parallel_size": LeftOut(_ONE_PROCESS, (None, 1)),
    "pipeline_parallel_size": LeftOut(_ONE_PROCESS, (None, 1)),
    "data_parallel_size": LeftOut(_ONE_PROCESS, (None, 1)),
    "enable_expert_parallel": LeftOut(_ONE_PROCESS, (None, False)),
    "distributed_executor_backend": LeftOut(_ONE_PROCESS),
    "worker_cls": LeftOut(_ONE_PROCESS, (None, "auto")),
    "disable_custom_all_reduce": LeftOut(_ONE_PROCESS, (None, False, True)),
    "disable_async_output_proc": LeftOut(_ONE_PROCESS, (None, False, True)),
    "disable_log_stats": LeftOut("run= of an answer has the counters", (None, True)),
    "compilation_config": LeftOut("models are not compiled"),
    "speculative_config": LeftOut("no draft model is used; verify= drafts under the policy"),
    "task": LeftOut("models generate", (None, "auto", "generate")),
    "runner": LeftOut("models generate", (None, "auto", "generate")),
    "convert": LeftOut("models generate", (None, "auto", "none")),
    "override_pooler_config": LeftOut("models generate"),
    "pooler_config": LeftOut("models generate"),
    "tokenizer_mode": LeftOut("transformers picks the tokenizer", (None, "auto")),
    "tokenizer_revision": LeftOut("revision= is the tokenizer's too"),
    "skip_tokenizer_init": LeftOut("SamplingParams(detokenize=False) makes no text", (None, False)),
    "config_format": LeftOut("models are those of transformers", (None, "auto", "hf")),
    "load_format": LeftOut(
        "weights are safetensors, or a .gguf file", (None, "auto", "hf", "safetensors")
    ),
    "model_loader_extra_config": LeftOut("give the model object that you have loaded", (None, {})),
    "hf_config_path": LeftOut("give the model object that you have loaded"),
    "hf_overrides": LeftOut("give the model object that you have loaded", (None, {})),
    "rope_scaling": LeftOut("give the model object that you have loaded", (None, {})),
    "download_dir": LeftOut("HF_HOME says where the hub's cache lies"),
    "code_revision": LeftOut("revision= is the code's too"),
    "override_generation_config": LeftOut("give SamplingParams", (None, {})),
    "logits_processors": LeftOut("SamplingParams has logits_processors"),
    "logprobs_mode": LeftOut("logprobs are the model's own", (None, "raw_logprobs")),
    "enable_lora": LeftOut("give a model object with its adapter", (None, False)),
    "allowed_local_media_path": LeftOut(_TEXT_ALONE, (None, "")),
    "mm_processor_kwargs": LeftOut(_TEXT_ALONE),
    "limit_mm_per_prompt": LeftOut(_TEXT_ALONE, (None, {})),
    "disable_mm_preprocessor_cache": LeftOut(_TEXT_ALONE, (None, False)),
    "structured_outputs_config": LeftOut("answers are not held to a grammar"),
    "guided_decoding_backend": LeftOut("answers are not held to a grammar", (None, "auto")),
}
"""By name. At its neutral values an argument is taken."""


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments of vLLM that ask for something, and names that neither has.

    Raises:
        ConfigError: names the first of them, with its reason if it is vLLM's.
    """
    refuse("LLM", given.keys(), given, LEFT_OUT_ARGUMENTS)


_GENERATE_LEFT_OUT: Mapping[str, LeftOut] = {
    "lora_request": LeftOut("give LLM a model object with its adapter"),
    "prompt_adapter_request": LeftOut("give LLM a model object with its adapter"),
    "priority": LeftOut(_BATCHES),
    "prompt_token_ids": LeftOut("give {'prompt_token_ids': ids} as a prompt"),
    "tokenization_kwargs": LeftOut(
        "SamplingParams has truncate_prompt_tokens; give token ids for more", (None, {})
    ),
    "guided_options_request": LeftOut("answers are not held to a grammar"),
    "mm_processor_kwargs": LeftOut(_TEXT_ALONE),
}


def check_generate_arguments(where: str, given: Mapping[str, Any]) -> None:
    """Refuse arguments of vLLM's `generate` and `chat` that ask for something, and unknown ones.

    Raises:
        ConfigError: names the first of them, with its reason if it is vLLM's.
    """
    refuse(where, given.keys(), given, _GENERATE_LEFT_OUT)


_METHODS_LEFT_OUT: Mapping[str, str] = {
    "beam_search": "beams are searched by BeamSearcher",
    **dict.fromkeys(
        ("encode", "embed", "classify", "reward", "score"), "models generate; none is pooled"
    ),
    **dict.fromkeys(("sleep", "wake_up"), "a call frees its cache when it returns"),
    "get_metrics": "run= of an answer has the counters",
    "llm_engine": "LLM runs a call's prompts itself",
    "set_tokenizer": "give LLM tokenizer=",
    "collective_rpc": _ONE_PROCESS,
    "apply_model": "the model is LLM.model",
    "reset_prefix_cache": "no cache is shared between calls",
}


def missing_attribute(name: str) -> AttributeError:
    """The error for an attribute that `LLM` lacks; says what to take instead of vLLM's."""
    reason = _METHODS_LEFT_OUT.get(name)
    return AttributeError(f"LLM has no {name}" + (f": {reason}" if reason else ""))
