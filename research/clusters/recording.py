"""What is read with full attention, and its keys and queries: texts, options, the stream."""

import argparse
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError, PromptError
from penstock.engine.attention_call import AttentionCall
from penstock.evaluate.audit.tap import AttentionTap
from penstock.evaluate.progress import Progress
from penstock.evaluate.result import Result, without_path
from penstock.evaluate.tasks import GeneratedTasks
from penstock.evaluate.tasks.documents import Document, count_tokens
from penstock.evaluate.tasks.long_output import long_walk
from penstock.evaluate.tasks.words import Words
from penstock.generation.prompts import encode, read_text_file
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel
from penstock.models.model_shape import inspect_model
from penstock.models.plain_model import plain_cache

# What clusters are made of and asked with ---------------------------------------------------------

Counter = Callable[[int], None]
"""Called with the tokens done so far."""


@dataclass(frozen=True, kw_only=True)
class KeyStream:
    """What full attention's tiered layers made of a prompt and the output behind it."""

    prompt_tokens: int
    keys: list[Tensor]
    """Post-RoPE, of all tokens, by layer. float32 [kv_heads, tokens, head_dim]"""
    queries: list[Tensor]
    """Post-RoPE, of all tokens, by layer. float32 [num_heads, tokens, head_dim]"""
    scaling: list[float]
    """Factor on the logits, by layer."""
    layers: tuple[int, ...]
    """Numbers of those layers in the model."""
    expected: float
    """Share of the output's tokens that the model would have said itself at their place."""

    @property
    def output_tokens(self) -> int:
        """Tokens behind the prompt."""
        return int(self.keys[0].shape[1]) - self.prompt_tokens

    def only(self, layers: Sequence[int]) -> "KeyStream":
        """Some of the layers, by their place in `keys`."""
        return replace(
            self, keys=[self.keys[layer] for layer in layers],
            queries=[self.queries[layer] for layer in layers],
            scaling=[self.scaling[layer] for layer in layers],
            layers=tuple(self.layers[layer] for layer in layers),
        )  # fmt: skip

    def grouped_queries(self, layer: int) -> Tensor:
        """A layer's queries by KV head. [kv_heads, heads of each, tokens, head_dim]"""
        queries = self.queries[layer]
        return queries.view(len(self.keys[layer]), -1, *queries.shape[1:])


def record_keys(
    loaded: LoadedModel, ids: list[int], prompt_tokens: int, *, chunk: int,
    on_chunk: Counter = lambda _: None,
) -> KeyStream:  # fmt: skip
    """Read a text with full attention and keep every layer's keys and queries.

    Args:
        ids: prompt and output.
        prompt_tokens: how many of them are the prompt.
        chunk: tokens per forward pass.

    Raises:
        PromptError: there is no output, or the text does not fit the model's positions.
        UnsupportedModelError: a layer's keys never come to the attention function.
    """
    model = loaded.model
    shape = inspect_model(model)
    if len(ids) <= prompt_tokens or prompt_tokens < 2:
        raise PromptError(f"{len(ids)} tokens hold no prompt of {prompt_tokens} and an output")
    if len(ids) > shape.max_positions:
        raise PromptError(
            f"{len(ids):,} tokens do not fit {loaded.name}, which has {shape.max_positions:,} "
            "positions; ask for a shorter --max-new-tokens"
        )
    device = model.get_input_embeddings().weight.device
    cache: Any = plain_cache(model, "dynamic", len(ids))
    queries: list[list[Tensor]] = [[] for _ in shape.tiered_layers]
    scaling = [0.0] * len(queries)

    def see(number: int, call: AttentionCall) -> None:
        queries[number].append(call.query[0].float().cpu())
        scaling[number] = call.scaling

    tap = AttentionTap(cache, shape, see)
    text, said = torch.tensor([ids], device=device), list[Tensor]()
    decoder: Any = model
    with torch.no_grad(), tap.watching(model):
        for start in range(0, len(ids), chunk):
            part = text[:, start : start + chunk]
            out = decoder(part, **cache_argument(decoder, cache), use_cache=True)
            said.append(out.logits[0].argmax(dim=-1).cpu())
            on_chunk(start + part.shape[1])
    tap.check_all_seen()
    guessed = torch.cat(said)[prompt_tokens - 1 : -1]
    right = guessed == torch.tensor(ids[prompt_tokens:])
    keys = [cache.layers[layer].keys[0].float().cpu() for layer in shape.tiered_layers]
    return KeyStream(
        prompt_tokens=prompt_tokens, keys=keys,
        queries=[torch.cat(parts, dim=1) for parts in queries], scaling=scaling,
        layers=shape.tiered_layers, expected=float(right.float().mean()),
    )  # fmt: skip


# The right answer is as long as wanted, behind a prompt of any length -----------------------------
#
# The long-output tasks end: an answer of `long_walk` is half as long as its prompt at most, and
# that of `two_walkers` a fifth. DynaKV is about outputs several times as long as the prompt, so
# that here both paths of `two_walkers` are closed to rings, and the walkers go round until they are
# cut off. The bundled model knows the format, rules and steps word by word, from `two_walkers`.

_PREFACE = "Memorize the path rules below . Follow the path later ."
_RULE_TOKENS = 6
_STEP_TOKENS = 8
_RING_PART = 4
"""A ring is made of one rule in so many; the rules of no ring lead anywhere."""


def ring_walk(
    tokens: int, output_tokens: int, rng: random.Random, words: Words
) -> tuple[str, str]:  # fmt: skip
    """A prompt of at most `tokens` tokens, and an answer of at least `output_tokens`.

    Raises:
        ConfigError: `tokens` is too short for two rings of two rules.
    """
    nodes = words.key_pool(rng, tokens // _RULE_TOKENS + 4)
    hops = tokens // _RULE_TOKENS // _RING_PART
    if hops < 2:
        raise ConfigError(f"a prompt of {tokens} tokens is too short for two walkers; give more")
    red, blue = nodes[:hops], nodes[hops : 2 * hops]
    question = f"Question : Walk red at {red[0]} and blue at {blue[0]} until stop . Answer :"
    rules = [f"{a} > {b} ;" for ring in (red, blue) for a, b in pairwise([*ring, ring[0]])]
    document = Document(tokens, _PREFACE, question, sum(map(count_tokens, rules)))
    others = nodes[2 * hops :][: document.room // _RULE_TOKENS]
    rules += [f"{node} > {rng.choice(nodes)} ;" for node in others]
    rng.shuffle(rules)
    steps = []
    for place in range(-(-output_tokens // (2 * _STEP_TOKENS))):
        for name, ring in (("red", red), ("blue", blue)):
            here, there = ring[place % hops], ring[(place + 1) % hops]
            steps.append(f"{name} : {here} > {there} ;")
    return document.finish(rules), " ".join(steps)


# A prompt, and the output that is forced or generated behind it -----------------------------------

RING_WALK, LONG_WALK = "ring_walk", "long_walk"


def read_on(
    loaded: LoadedModel, path: str | Path, *, prompt_tokens: int, output_tokens: int
) -> list[int]:  # fmt: skip
    """The first tokens of a text file: a prompt, and the text's own continuation.

    Raises:
        PromptError: the file cannot be read, or is too short.
    """
    ids = encode(loaded, read_text_file(path, "text"))
    wanted = prompt_tokens + output_tokens
    if len(ids) < wanted:
        raise PromptError(
            f"the text has {len(ids):,} tokens, and --prompt and --max-new-tokens ask for "
            f"{wanted:,}; give a longer one, or ask for fewer"
        )
    return ids[:wanted]


def digest_of_text(path: str | Path | None) -> str | None:
    """What tells texts apart whose paths no result shows; None where no file is read.

    Raises:
        PromptError: the file cannot be read.
    """
    if path is None:
        return None
    return hashlib.sha256(read_text_file(path, "text").encode()).hexdigest()[:16]


def answer_of(
    loaded: LoadedModel, task: str, *, prompt_tokens: int, output_tokens: int, seed: int
) -> tuple[list[int], int]:  # fmt: skip
    """A task's prompt with its right answer behind it, both as tokens.

    Args:
        task: `ring_walk`, `long_walk`, or one of `penstock bench accuracy`.
        prompt_tokens: most tokens of the prompt.
        output_tokens: most tokens of the answer; those of tasks that end may be fewer.

    Returns:
        Prompt and answer, and how many of them are the prompt.

    Raises:
        ConfigError: no such task, or not for this model.
    """
    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.name} has no tokenizer, so that it cannot be given a task")
    rng = random.Random(f"{seed}/{task}/{prompt_tokens}")
    if task in (RING_WALK, LONG_WALK):
        words = Words.of(loaded.tokenizer)
        if task == RING_WALK:
            prompt, answer = ring_walk(prompt_tokens, output_tokens, rng, words)
        else:
            sample = long_walk(prompt_tokens, rng, words)
            prompt, answer = sample.prompt, sample.answer
    else:
        [sample] = GeneratedTasks(loaded.tokenizer).draw(
            task, 0, 1, tokens=prompt_tokens, seed=seed
        )
        prompt, answer = sample.prompt, sample.answer
    before = encode(loaded, prompt)
    whole = encode(loaded, f"{prompt} {answer}")
    if whole[: len(before)] != before:
        raise ConfigError(f"the answer of {task} cannot be told from its prompt in tokens")
    return whole[: len(before) + output_tokens], len(before)


def generated(
    loaded: LoadedModel, prompt: list[int], output_tokens: int, *, on_token: Counter
) -> list[int]:  # fmt: skip
    """A prompt and what the model says behind it: the likeliest tokens, past its end if need be.

    Args:
        on_token: called with the tokens said so far.
    """
    model: Any = loaded.model
    cache: Any = plain_cache(loaded.model, "dynamic", len(prompt) + output_tokens)
    ids, fed = list(prompt), torch.tensor([prompt])
    with torch.no_grad():
        for done in range(output_tokens):
            out = model(fed, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
            fed = out.logits[:, -1].argmax(dim=-1, keepdim=True)
            ids.append(int(fed))
            on_token(done + 1)
    return ids


# What programs record, the options and facts of it ------------------------------------------------


def add_recording_options(
    parser: argparse.ArgumentParser, *, task: str, prompt: int, output: int
) -> None:
    """Options of the model and of the text.

    Args:
        task, prompt, output: what is read if the command line names nothing else.
    """
    add = parser.add_argument
    add("--model", default="recall", help="the bundled model, a released one, or a folder")
    add("--text", metavar="FILE", help="read this text on, in place of a task")
    add("--task", default=task, help="whose right answer is the output (ring_walk, long_walk,"
        " or a task of penstock bench accuracy)")  # fmt: skip
    add("--generate", action="store_true", help="the output is what the model says itself")
    add("--prompt", type=int, default=prompt, help="tokens of the prompt")
    add("--max-new-tokens", dest="output", type=int, default=output,
        help="most tokens of the output")  # fmt: skip
    add("--chunk", type=int, default=512, help="tokens per forward pass")


def begin_recording(kind: str, arguments: Sequence[str], args: argparse.Namespace) -> Result:
    """The result of a program that records; it does not show the text's path."""
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "json", "text")}
    settings["model"] = model_name(args.model)
    shown = without_path(arguments, "--text", args.text)
    return Result.begin(kind, shown, settings, seed=args.seed, package="research")


def record(
    loaded: LoadedModel, args: argparse.Namespace, *, prompt_tokens: int, output_tokens: int
) -> KeyStream:  # fmt: skip
    """Read what the command line asks for.

    Raises:
        PenstockError: bad input.
    """
    if args.text:
        prompt = prompt_tokens
        ids = read_on(loaded, args.text, prompt_tokens=prompt, output_tokens=output_tokens)
    else:
        ids, prompt = answer_of(
            loaded, args.task, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
            seed=args.seed,
        )  # fmt: skip
    if args.generate:
        said = Progress(output_tokens).up_to("generated")
        ids = generated(loaded, ids[:prompt], output_tokens, on_token=said)
    read = Progress(len(ids)).up_to("tokens read")
    return record_keys(loaded, ids, prompt, chunk=args.chunk, on_chunk=read)


def facts_of(stream: KeyStream, args: argparse.Namespace) -> dict[str, Any]:
    """What was recorded, for the result."""
    return {
        "model": model_name(args.model), "prompt_tokens": stream.prompt_tokens,
        "output_tokens": stream.output_tokens, "layers": list(stream.layers),
        "kv_heads": stream.keys[0].shape[0],
        "output": "generated" if args.generate else "text" if args.text else args.task,
        "expected": stream.expected,
    }  # fmt: skip


def model_name(text: str) -> str:
    """What a model is called: the folder, or the one above it if that is just `model`."""
    path = Path(text)
    return path.parent.name if path.name == "model" and path.parent.name else path.name
