"""attention_scaling(): the factor that a model's attention puts on products of queries and keys."""

from transformers import PreTrainedModel

_SCALED_BEFORE = ("opt",)
"""Model types whose queries are scaled before the attention function sees them."""


def attention_scaling(model: PreTrainedModel, head_dim: int) -> float:
    """What the model hands to its attention function as `scaling`; indexes weigh tokens with it.

    Granite's is a setting, Gemma's comes from `query_pre_attn_scalar`; most have
    1 / sqrt(head_dim). Where layers differ, or say nothing, it is that.
    """
    if model.config.model_type in _SCALED_BEFORE:
        return 1.0
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    factors = [getattr(layer, "scaling", None) for layer in layers]
    said = {float(factor) for factor in factors if isinstance(factor, int | float)}
    return said.pop() if len(said) == 1 else head_dim**-0.5
