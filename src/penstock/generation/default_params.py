"""default_sampling_params(): the sampling settings that a model's generation config asks for."""

from penstock.generation.sampling import SamplingParams
from penstock.models.loader import CausalLM

_TAKEN = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Fields of a generation config that vLLM takes, and their names here."""


def default_sampling_params(model: CausalLM) -> SamplingParams:
    """What vLLM samples with where nothing is asked for: what the model's own generation config
    says, and else the defaults of `SamplingParams`.

    Raises:
        ConfigError: the generation config has a value out of its range.
    """
    said = model.generation_config.to_diff_dict()
    return SamplingParams(
        **{ours: said[name] for name, ours in _TAKEN.items() if said.get(name) is not None}
    )
