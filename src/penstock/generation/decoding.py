"""What `model.generate` is called with: only forward passes are its, choices and ends are ours."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.generation.answer import EndTokens
from penstock.models.loader import CausalLM, Tokenizer

_NEUTRAL = {
    "do_sample": False, "num_beams": 1, "num_return_sequences": 1, "use_cache": True,
    "return_dict_in_generate": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50,
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0,
    "renormalize_logits": False, "remove_invalid_values": False,
    "max_length": None, "cache_implementation": None, "prefill_chunk_size": None,
}  # fmt: skip
"""Of a generation config: nothing but the most probable token, of scores as they are."""
_UNSET = (
    "bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id",
    "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty",
    "watermarking_config", "min_new_tokens", "max_time", "stop_strings", "guidance_scale", "min_p",
    "cache_implementation", "prompt_lookup_num_tokens", "penalty_alpha", "dola_layers",
)  # fmt: skip
"""Fields without a neutral value but None. What is None in a config of a call is taken from the
model's, unless it is an argument too."""


def vocabulary_size(model: CausalLM) -> int:
    """Tokens that a model has embeddings of."""
    return int(model.get_input_embeddings().weight.shape[0])


def end_tokens(model: CausalLM, tokenizer: Tokenizer | None) -> EndTokens:
    """The tokens that end an answer, as vLLM takes them: the tokenizer's, and all of the model's
    generation config."""
    said: Any = model.generation_config.eos_token_id
    own = [] if said is None else [said] if isinstance(said, int) else list(said)
    primary = None if tokenizer is None else tokenizer.eos_token_id
    if primary is None:
        primary = next(iter(own), None)
    return EndTokens(primary=primary, others=frozenset(own) - {primary})


def padding_token(model: CausalLM, ends: EndTokens) -> int:
    """A token for short rows and those that are done.

    Which one changes nothing, but some models name one that they do not have: -1, or the first
    behind their vocabulary.
    """
    wanted = (model.generation_config.pad_token_id, ends.primary, *sorted(ends.others))
    size = vocabulary_size(model)
    return next((each for each in wanted if each is not None and 0 <= each < size), 0)


def generate_arguments(model: CausalLM, max_new_tokens: int, pad_token_id: int) -> dict[str, Any]:
    """A generation config for `model.generate`, and what it does not take from one."""
    own: Any = model.generation_config
    config = copy.deepcopy(own)
    for name, value in _NEUTRAL.items():
        setattr(config, name, value)
    config.max_new_tokens = max_new_tokens
    config.pad_token_id = pad_token_id
    # No token has this id: rows end by `DecodeSteps` alone, and are padded from then on.
    config.eos_token_id = vocabulary_size(model)
    unset = {name: None for name in _UNSET if getattr(own, name, None) is not None}
    return {"generation_config": config, **unset}


class DecodeSteps:
    """Logits processor and stopping criterion of one call to `generate`: each step goes out to
    where tokens are chosen and taken."""

    def __init__(
        self,
        choose: Callable[[Tensor], Sequence[int]],
        take: Callable[[], Sequence[bool]],
    ) -> None:
        """Remember whom to ask.

        Args:
            choose: makes the tokens of a step from its logits [rows, vocabulary].
            take: takes them; returns which rows are done.
        """
        self._choose, self._take = choose, take

    def processor(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores in which each row's token is the best. [rows, vocabulary]"""
        del input_ids
        tokens = torch.tensor(self._choose(scores), device=scores.device)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)

    def criterion(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which rows are done. bool [rows]"""
        del scores, kwargs
        return torch.tensor(self._take(), device=input_ids.device)
