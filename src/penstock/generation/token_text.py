"""Text of generated tokens, what ends it by the model itself, and tokens of words."""

from collections.abc import Sequence

from penstock.core.errors import ConfigError
from penstock.models.loader import CausalLM, Tokenizer


def text_of(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """The text of tokens, special ones left out, and nothing of it cleaned up.

    Some tokenizers (Llama 3's) ask for a clean-up that takes spaces away, as in front of "'s".
    transformers of today does not do that to BPE; older ones do, and then the text of some tokens
    is no beginning of the text of more.
    """
    return str(
        tokenizer.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
    )


def piece_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of tokens by themselves, special ones too."""
    return text_of(tokenizer, token_ids, skip_special_tokens=False)


def own_stop_texts(model: CausalLM) -> tuple[str, ...]:
    """The strings that end an answer by a model's own generation config."""
    own = getattr(model.generation_config, "stop_strings", None) or ()
    return tuple(filter(None, [own] if isinstance(own, str) else own))


def bad_word_ids(tokenizer: Tokenizer | None, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Tokens of words, at the beginning of a text and inside it, as vLLM finds them.

    Raises:
        ConfigError: there is no tokenizer, or a word has no tokens.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise ConfigError("bad_words needs a tokenizer to know the tokens of a word")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare, spaced = (
            tuple(tokenizer(front + word.lstrip(), add_special_tokens=False)["input_ids"])
            for front in ("", " ")
        )
        if not bare:
            raise ConfigError(f"bad_words has {word!r}, which has no tokens")
        found[bare] = None
        # Otherwise the space is a token of its own, and the word is the same behind it.
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found[spaced] = None
    return tuple(found)
