"""text_of(): the text of generated tokens."""

from collections.abc import Sequence

from penstock.models.loader import Tokenizer


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of tokens, special ones left out, and nothing of it cleaned up.

    Some tokenizers (Llama 3's) ask for a clean-up that takes spaces away, as in front of "'s".
    transformers of today does not do that to BPE; older ones do, and then the text of some tokens
    is no beginning of the text of more.
    """
    ids = list(token_ids)
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
