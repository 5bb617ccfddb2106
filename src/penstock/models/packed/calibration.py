"""calibrate(): what a model does with text says how its weights are to be packed in 4 bits.

The mean square of each input column weighs the error of its weights, as llama.cpp's imatrix and
AWQ (Lin et al. 2023, section 3) have it. Which matrices stay in 8 bits is measured: each kind of
each part of the layers is rounded alone, and the model's distribution of tokens compared with what
it was. The layers of a part share what is found by the errors of their outputs. Rounding does not
add up exactly, but nearly so.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.kernels.packed_weights import GROUP
from penstock.models.calibration_text import MOST_UNKNOWN, code, dialogue, prose, unknown_share
from penstock.models.packed.form import Form
from penstock.models.packed.modules import PackedLinear, packed_modules
from penstock.models.packed.quantizer import replace_modules

_PIECE_TOKENS = 512
_LEAST_TOKENS = 64
"""Of a piece: below, it says too little."""
_HELD_TOKENS = 256
"""Of a held-out piece."""
_PIECES = 4
"""Of each text."""
_CHARACTERS = 8
"""Of a token, more than most texts have."""
_MARGIN = 16
"""Tokens before the place where a text was cut, which may be others for it."""
LOSS_BOUND = 0.005
"""Divergence (nats a token) that 4 bits may cost, by the sum of what was measured."""
MOST_MORE_BYTES = 0.25
"""Of the layers' bytes in 4 bits, that matrices in 8 bits may take on top."""
_SMALL_WEIGHTS = 1_000_000_000
_PARTS = 4
"""Of a small model's layers, measured apart; a larger one's are measured together."""
_KEPT = 192
"""Last positions of each held-out piece that are compared."""
_NUMBER = re.compile(r"\.(\d+)\.")


class Calibrated(NamedTuple):
    """How a model's layers are to be packed."""

    importance: dict[str, Tensor]
    """Mean square of input columns, by module. float32 [width]"""
    forms: dict[str, list[int]]
    """Bits and group, by module."""


def calibration_pieces(tokenizer: Any, config: Any) -> list[Tensor]:
    """Pieces of the texts that ship, the last ones of prose and code at the end.

    Args:
        tokenizer: None: there are none.
        config: of the model.

    Returns:
        int64 [tokens], of one length; none of a text that a tokenizer has no words for.
    """
    if tokenizer is None:
        return []
    inner = config.get_text_config(decoder=True)
    positions = getattr(inner, "max_position_embeddings", None) or _PIECE_TOKENS
    tokens = min(_PIECE_TOKENS, positions)
    pieces: list[Tensor] = []
    ends: list[Tensor] = []
    for text, holds_out in ((dialogue(), False), (prose(), True), (code(), True)):
        ids = _first_tokens(text, tokens * _PIECES, tokenizer)
        known = unknown_share(ids, tokenizer) <= MOST_UNKNOWN
        if tokens < _LEAST_TOKENS or not known or max(ids, default=0) >= inner.vocab_size:
            continue
        found = [torch.tensor(ids[at : at + tokens]) for at in range(0, len(ids), tokens)]
        found = [piece for piece in found if len(piece) == tokens]
        if holds_out and len(found) > 1:
            ends.append(found.pop())
        pieces += found
    return [*pieces, *ends] if len(ends) == 2 else []


def _first_tokens(text: str, count: int, tokenizer: Any) -> list[int]:
    """The tokens that a text begins with; it is not read to its end where less will do."""
    for part in (text[: _CHARACTERS * count], text):
        ids: list[int] = tokenizer(part, add_special_tokens=True, verbose=False)["input_ids"]
        if len(ids) > count + _MARGIN or part == text:
            break
    return ids[:count]


@torch.no_grad()
def calibrate(
    model: PreTrainedModel, empty: PreTrainedModel, texts: Sequence[Tensor],
    on_step: Callable[[int, int], None],
) -> Calibrated:  # fmt: skip
    """Run texts through a plain model, and decide.

    Args:
        model: with its plain weights.
        empty: the same on "meta"; it is used up.
        texts: pieces of one length. The last two are held out to measure what rounding costs.
            int64 [tokens]
        on_step: called with steps done and steps in all.
    """
    linear = _four_bit_layers(model, empty)
    if not linear:
        return Calibrated({}, {})
    held_out, seen = [text[:_HELD_TOKENS] for text in texts[-2:]], texts[:-2]
    together = _pieces_together(linear, len(texts[0]))
    batches = [seen[first : first + together] for first in range(0, len(seen), together)]
    units = _units(linear)
    steps = len(batches) + 1 + len(units)
    squares = {path: torch.zeros(module.in_features) for path, module in linear.items()}
    with ExitStack() as hooks:
        for path, module in linear.items():
            hook = module.register_forward_pre_hook(partial(_add_squares, squares[path]))
            hooks.callback(hook.remove)
        for number, batch in enumerate(batches, 1):
            _logits(model, torch.stack(list(batch)), 1)
            on_step(number, steps)
    ids, done = torch.stack(held_out), itertools.count(len(batches) + 1)
    plain = _logits(model, ids, _KEPT)
    on_step(next(done), steps)

    def diverges() -> float:
        found = divergence(plain, _logits(model, ids, _KEPT))
        on_step(next(done), steps)
        return found

    eight = _stay_in_eight(linear, _costs(linear, units, squares, diverges))
    forms = {path: [8, 0] if path in eight else [4, GROUP] for path in linear}
    return Calibrated(squares, forms)


def _four_bit_layers(model: PreTrainedModel, empty: PreTrainedModel) -> dict[str, nn.Linear]:
    """Linear layers of a plain model that 4 bits fit, by path."""
    replace_modules(empty, 4, {}, ready=True)
    output = empty.get_output_embeddings()
    plain = dict(model.named_modules())
    return {
        path: plain[path]
        for path, module in packed_modules(empty).items()
        if isinstance(module, PackedLinear) and module is not output
        and Form.fitting(4, module.out_features, module.in_features) == Form(4, GROUP)
    }  # fmt: skip


def _units(linear: Mapping[str, nn.Linear]) -> dict[tuple[str, int], list[str]]:
    """Paths by kind and part of the layers: what is measured together."""
    small = sum(module.weight.numel() for module in linear.values()) < _SMALL_WEIGHTS
    parts = _PARTS if small else 1
    numbers = {path: int(found[1]) if (found := _NUMBER.search(path)) else 0 for path in linear}
    layers = max(numbers.values(), default=0) + 1
    units: dict[tuple[str, int], list[str]] = {}
    for path, number in numbers.items():
        kind = _NUMBER.split(path)[-1]
        units.setdefault((kind, number * parts // layers), []).append(path)
    return units


def _costs(
    linear: Mapping[str, nn.Linear], units: Mapping[tuple[str, int], Sequence[str]],
    importance: Mapping[str, Tensor], diverges: Callable[[], float],
) -> dict[str, float]:  # fmt: skip
    """How much each layer's 4 bits make the model diverge.

    A unit's layers share its divergence by the errors of their outputs. The least of a part of the
    layers is taken off: in bfloat16 another order of sums makes as much, the more the earlier.
    """
    found: dict[tuple[str, int], float] = {}
    errors: dict[str, float] = {}
    for unit, paths in units.items():
        with _rounded(linear, paths, importance, errors):
            found[unit] = diverges()
    costs = {}
    for unit, paths in units.items():
        cost = found[unit] - min(found[each] for each in units if each[1] == unit[1])
        every = sum(errors.get(path, 0.0) for path in paths) or 1.0
        costs.update({path: cost * errors.get(path, 0.0) / every for path in paths})
    return costs


def _bytes(module: nn.Linear, bits: int) -> int:
    form = Form(4, GROUP) if bits == 4 else Form(8)
    row: int = form.row_bytes(module.in_features, module.weight.dtype)
    return module.out_features * row


def _pieces_together(linear: Mapping[str, nn.Linear], tokens: int) -> int:
    """Pieces of a pass, whose states in the widest layer stay within a few percent of the weights
    as they will be packed: weights that are mapped are read once for each pass."""
    weights = sum(each.weight.numel() for each in linear.values())
    widest = max(max(each.in_features, each.out_features) for each in linear.values())
    return max(1, weights // 40 // (4 * tokens * widest))


def _add_squares(into: Tensor, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    states = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
    into.add_(states.square().mean(dim=0))


def _logits(model: PreTrainedModel, ids: Tensor, kept: int) -> Tensor:
    """Of the last positions. [pieces, kept, vocabulary]"""
    found: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits
    return found[:, -kept:]


@contextmanager
def _rounded(
    linear: Mapping[str, nn.Linear], paths: Sequence[str], importance: Mapping[str, Tensor],
    errors: dict[str, float],
) -> Iterator[None]:  # fmt: skip
    """Have some layers compute with their weights in 4 bits, rounded when they are called.

    Args:
        errors: receives the mean square of what each adds to an output.
    """
    with ExitStack() as hooks:
        for path in paths:
            on_error = partial(errors.__setitem__, path)
            hook = partial(_by_rounded, importance[path], on_error)
            hooks.callback(linear[path].register_forward_hook(hook).remove)
        yield


def _by_rounded(
    importance: Tensor, on_error: Callable[[float], None], module: Any, inputs: tuple[Tensor, ...],
    _: Any,
) -> Tensor:  # fmt: skip
    form, dtype = Form(4, GROUP), module.weight.dtype
    packed = form.pack(module.weight, dtype, importance)
    weight = form.view(packed, module.in_features, dtype).plain(0, module.out_features)
    wrong = weight.float().sub_(module.weight).square_().mean(dim=0)
    on_error(float(wrong @ importance))
    return nn.functional.linear(inputs[0], weight, module.bias)


def divergence(plain: Tensor, other: Tensor) -> float:
    """Mean Kullback-Leibler divergence of other logits from plain ones, in nats. [..., n]"""
    total, count = 0.0, plain.shape[:-1].numel()
    for ours, theirs in zip(plain.flatten(0, -2), other.flatten(0, -2), strict=True):
        said, changed = ours.float().log_softmax(-1), theirs.float().log_softmax(-1)
        total += float((said.exp() * (said - changed)).sum())
    return total / count


def _stay_in_eight(linear: Mapping[str, nn.Linear], costs: Mapping[str, float]) -> set[str]:
    """Paths that stay in 8 bits: those that cost most for their bytes, until the rest costs little
    enough or there is no room for more."""
    room = MOST_MORE_BYTES * sum(_bytes(each, 4) for each in linear.values())
    more = {path: _bytes(module, 8) - _bytes(module, 4) for path, module in linear.items()}
    left = sum(costs.values())
    eight: set[str] = set()
    for path in sorted(costs, key=lambda path: -costs[path] / more[path]):
        if left <= LOSS_BOUND:
            break
        if more[path] <= room:
            room -= more[path]
            left -= costs[path]
            eight.add(path)
    return eight
