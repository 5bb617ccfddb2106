"""tiny_chat_model(): a decoder that has learnt nothing, with a tokenizer and a chat template."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.models.loader import LoadedModel

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A turn is a role's name and a text between two special tokens, with a newline behind."""
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>")


def byte_tokenizer(template: str | None = CHATML, *, ascii_alone: bool = True) -> Any:
    """A tokenizer whose tokens are bytes, behind three special ones; it puts <s> in front.

    Args:
        ascii_alone: none but printable ones, so that any tokens are a text of these tokens.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if ascii_alone:
        letters = [each for each in letters if each.isascii() or each in "\u0120\u010a"]
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *letters])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<|im_end|>",
        additional_special_tokens=list(_SPECIAL[:2]),
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def tiny_chat_model(
    *, positions: int = 4096, template: str | None = CHATML, folder: Path | None = None,
    ascii_alone: bool = True,
) -> LoadedModel:  # fmt: skip
    """A random Llama of two layers in float32.

    Args:
        positions: that the model has.
        template: of the tokenizer; None: it has none.
        folder: where model and tokenizer are saved too.
        ascii_alone: as for `byte_tokenizer`; else answers are seldom UTF-8.
    """
    tokenizer = byte_tokenizer(template, ascii_alone=ascii_alone)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=positions,
        bos_token_id=2, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # what was taught to chat begins no turn within an answer
        model.lm_head.weight[[0, 2]] = 0
    if folder is not None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return LoadedModel(model=model, tokenizer=tokenizer, name=str(folder or "tiny-chat"))
