"""A model that others trained answers through Penstock as it does without."""

from pathlib import Path
from typing import Any

import torch

from penstock import LLM, SamplingParams, load


def test_the_capital_of_france(smollm2_folder: Path) -> None:
    loaded = load(smollm2_folder, dtype="float32")
    tokenizer: Any = loaded.tokenizer
    model: Any = loaded.model
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    plain = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    params = SamplingParams(temperature=0, max_tokens=8)
    [output] = LLM(loaded, store="memory").generate(ids, params)
    assert "Paris" in output.text
    assert output.token_ids == plain[0, len(ids) :].tolist()
