"""Keys and queries of a pretrained model, kept in a file so that a study reads them again."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.evaluate.audit.reference import end_token_ids
from penstock.evaluate.tasks.english.prompt_fit import Prompter
from penstock.generation.prompts import make_batch
from penstock.models.loader import LoadedModel
from research.statistics.capture import full_attention_steps

ASKED = (
    "\n\nGo through the text above from its beginning to its end and retell every part of it, "
    "part by part, in a numbered list. Use at least three sentences for each part, keep to the "
    "text, name everything by its name, and do not stop before its end."
)
"""What a model is asked behind a text, so that its answer is long."""
LEAST_STEPS = 64
"""An answer that ends before says too little."""
_CHUNK = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One text, and who goes on with it."""

    name: str
    """"prose", "code" or "answer"."""
    text: str
    answers: bool
    """Whether the model answers a question about it, or the text itself goes on."""


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What all layers attended with, step by step."""

    keys: Tensor
    """Post-RoPE, of the prompt and of all steps. [layers, kv_heads, tokens, head_dim]"""
    queries: Tensor
    """Post-RoPE. [layers, steps, heads, head_dim]"""
    scaling: float
    prompt_tokens: int
    answer: str
    """What the model said; empty where a text went on."""


def capture(
    loaded: LoadedModel, case: Case, *, prompt_tokens: int, steps: int, file: Path | None,
    progress: Callable[[int], None],
) -> Capture:  # fmt: skip
    """Read a text and decode with full attention, or take both from `file`.

    Args:
        file: where the capture is kept; None: nowhere.
        progress: told how many tokens are done, of `prompt_tokens + steps`.

    Raises:
        ConfigError: the text is too short, or the answer ends at once.
    """
    if file is not None and file.exists():
        progress(prompt_tokens + steps)
        return _load(file)
    assert loaded.tokenizer is not None
    text = case.text
    following = None
    if case.answers:
        prompter = Prompter(loaded.tokenizer, chat=True)
        room = prompt_tokens - len(prompter.ids(prompter.render(ASKED, ""))) - 4
        plain = loaded.tokenizer(text[: 12 * room], add_special_tokens=False).input_ids[:room]
        _require(len(plain), room, case.name)
        ids = list(prompter.ids(prompter.render(loaded.tokenizer.decode(plain) + ASKED, "")))
    else:
        needed = prompt_tokens + steps
        plain = loaded.tokenizer(text[: 12 * needed], add_special_tokens=False).input_ids[:needed]
        _require(len(plain), needed, case.name)
        ids, following = plain[:prompt_tokens], torch.tensor([plain[prompt_tokens:]])
    batch = make_batch(loaded, [ids], new_tokens=steps, pad_token_id=0)
    queries, fed, last = [], [], None
    for last in full_attention_steps(
        loaded, batch, new_tokens=steps, chunk=_CHUNK, ends=end_token_ids(loaded),
        following=following, on_prefill=progress,
    ):  # fmt: skip
        queries.append(torch.stack([layer.query[0] for layer in last.layers]).cpu())
        fed.append(int(last.fed[0]))
        progress(prompt_tokens + len(queries))
    if last is None or len(queries) < LEAST_STEPS:
        raise ConfigError(
            f"the answer to {case.name} ends after {len(queries)} tokens; give another text"
        )
    made = Capture(
        keys=torch.stack([layer.keys[0] for layer in last.layers]).cpu(),
        queries=torch.stack(queries, dim=1), scaling=last.layers[0].scaling,
        prompt_tokens=len(ids), answer=loaded.tokenizer.decode(fed) if case.answers else "",
    )  # fmt: skip
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        _save(made, file)
    return made


def _require(found: int, needed: int, name: str) -> None:
    if found < needed:
        raise ConfigError(f"the text for {name} has {found:,} tokens; {needed:,} are needed")


def _save(made: Capture, file: Path) -> None:
    told = {"scaling": made.scaling, "prompt_tokens": made.prompt_tokens, "answer": made.answer}
    part = file.with_suffix(".part")
    save_file(
        {"keys": made.keys.contiguous(), "queries": made.queries.contiguous()}, part,
        metadata={"capture": json.dumps(told)},
    )  # fmt: skip
    part.rename(file)


def _load(file: Path) -> Capture:
    with safe_open(file, "pt") as opened:
        told = json.loads(opened.metadata()["capture"])
        return Capture(keys=opened.get_tensor("keys"), queries=opened.get_tensor("queries"), **told)
