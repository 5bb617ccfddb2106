"""Whether offloading pays: against everything in memory, recomputing, and a smaller model."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.core.byte_size import format_bytes
from penstock.core.errors import BudgetError
from penstock.tuner.cost_model import COMPUTE_EFFICIENCY, Prediction, Workload, predict, prefill_s
from penstock.tuner.model_sizes import ModelSizes, known_models
from penstock.tuner.step_work import make_policy

HIDDEN_SHARE = 0.05
"""A stall below this share of a step is called hidden."""


def advise(best: Prediction, load: Workload) -> list[str]:
    """Sentences, with numbers, on a prediction for `load`."""
    return [
        _bottleneck(best, load),
        _against_memory(best, load),
        _against_recomputing(best, load),
        _against_smaller_model(best, load),
    ]


def everything_in_memory(load: Workload) -> Prediction | None:
    """Full attention in all memory that the weights leave; None: not one sequence fits."""
    try:
        return predict(make_policy("full"), replace(load, limit_bytes=load.hardware.memory_bytes))
    except BudgetError:
        return None


def largest_smaller_model(best: Prediction, load: Workload) -> tuple[ModelSizes, Prediction] | None:
    """The largest known model that, with its whole cache, takes no more memory than the pick."""
    room = load.model.weight_bytes + best.resident_bytes
    for model in sorted(known_models().values(), key=lambda known: -known.weights):
        cache = model.shape.full_cache_bytes(load.batch, load.context)
        model = replace(model, bits=load.model.bits)
        smaller = replace(load, model=model, limit_bytes=cache)
        needed = model.weight_bytes + cache + smaller.state_bytes
        if model.weights < load.model.weights and needed <= room:
            return model, predict(make_policy("full"), smaller)
    return None


def _bottleneck(best: Prediction, load: Workload) -> str:
    ratio = f"{1e3 * best.io_s:.1f} ms of reads, {1e3 * best.block_s:.1f} ms of work per layer"
    if best.io_s == 0:
        return f"{best.policy}: nothing is read from disk; memory bandwidth sets the pace."
    if best.stall_share < HIDDEN_SHARE:
        return f"{best.policy}: {load.disk.title} is hidden behind the model ({ratio})."
    return (
        f"{best.policy}: {load.disk.title} sets the pace, {100 * best.stall_share:.0f} % of a step "
        f"waits for it ({ratio})."
    )


def _against_memory(best: Prediction, load: Workload) -> str:
    head = (
        f"Everything in memory: weights {format_bytes(load.model.weight_bytes)} + KV "
        f"{format_bytes(load.full_bytes)} of {format_bytes(load.hardware.memory_bytes)}"
    )
    plain = everything_in_memory(load)
    if plain is None:
        return f"{head}: not one sequence fits, so that KV must be offloaded, cut or scaled_down."
    waves = (
        "" if plain.waves == 1 else f", in {plain.waves} waves, as not all sequences fit at once"
    )
    verdict = f"{plain.tokens_per_s:.1f} tokens/s{waves}, against {best.tokens_per_s:.1f}"
    if plain.tokens_per_s >= best.tokens_per_s:
        saved = format_bytes(load.full_bytes - best.resident_bytes)
        pays = f"offloading costs speed here and pays only for the {saved} it frees"
        if best.resident_bytes >= load.full_bytes:
            pays = "nothing is offloaded"
        return f"{head}: {verdict}; {pays}."
    return f"{head}: {verdict}; offloading with selection is faster."


def _against_recomputing(best: Prediction, load: Workload) -> str:
    recompute = prefill_s(load)
    model = load.model
    flops = 2.0 * (model.shape.num_layers * model.layer_weights + model.beside.weights)
    token_s = flops / (COMPUTE_EFFICIENCY * load.hardware.flops)
    read_s = load.model.shape.full_cache_bytes(1, 1) / load.disk.bandwidth
    return (
        f"Recomputing: the past again at every step gives {load.batch / recompute:.2g} tokens/s; "
        f"a past token's KV takes {1e3 * token_s:.2f} ms to compute, {1e3 * read_s:.2f} ms to read "
        f"({'reading' if read_s <= token_s else 'computing'} is faster where all are wanted, and "
        f"{best.policy} wants {best.selected_tokens:,} of {load.context:,} in a layer)."
    )


def _against_smaller_model(best: Prediction, load: Workload) -> str:
    found = largest_smaller_model(best, load)
    if found is None:
        return (
            "A smaller model: no known one has room for its whole cache in the same memory "
            f"({format_bytes(load.model.weight_bytes + best.resident_bytes)} with weights)."
        )
    model, plain = found
    word = "faster" if plain.tokens_per_s > best.tokens_per_s else "slower"
    return (
        f"A smaller model: {model.name} with its whole cache fits into the same memory and gives "
        f"{plain.tokens_per_s:.1f} tokens/s, {word}, with what quality is for you to judge."
    )


def fastest(predictions: Sequence[Prediction]) -> Prediction:
    """The prediction with most tokens/s."""
    return max(predictions, key=lambda prediction: prediction.tokens_per_s)
