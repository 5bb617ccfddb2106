"""text_of(): the text of generated tokens; own_stop_texts(): what ends it by the model itself."""

from collections.abc import Sequence

from penstock.models.loader import CausalLM, Tokenizer


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of tokens, special ones left out, and nothing of it cleaned up.

    Some tokenizers (Llama 3's) ask for a clean-up that takes spaces away, as in front of "'s".
    transformers of today does not do that to BPE; older ones do, and then the text of some tokens
    is no beginning of the text of more.
    """
    ids = list(token_ids)
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def own_stop_texts(model: CausalLM) -> tuple[str, ...]:
    """The strings that end an answer by a model's own generation config."""
    own = getattr(model.generation_config, "stop_strings", None) or ()
    return tuple(filter(None, [own] if isinstance(own, str) else own))
