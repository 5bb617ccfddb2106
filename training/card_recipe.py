"""How a model was trained, as lines of its card: shape, rows, mix, rates."""

from collections.abc import Mapping, Sequence
from typing import Any

from training import card_prose, card_video
from training.card_sittings import begins_of

Record = Mapping[str, Any]


def recipes(logs: Sequence[Sequence[Record]]) -> list[str]:
    """The recipe of every sitting, with a heading if there are several."""
    parts = []
    for number, log in enumerate(logs, 1):
        begin = begins_of(log)[-1]
        steps = [record for record in log if record["kind"] == "train"]
        heading = [f"### Sitting {number}: {begin['settings']['name']}"] if len(logs) > 1 else []
        parts += [*heading, _recipe(begin["settings"], begin, steps)]
    return parts


def _recipe(settings: Record, begin: Record, steps: Sequence[Record]) -> str:
    model, plan = settings["model"], settings["optimizer"]
    done, told = steps[-1]["step"], []
    for stage in settings["stages"]:  # with --fit the last one is as long as the time allowed
        told.append(f"{min(stage['steps'], done):,} steps of {_listed(stage['lengths'])}")
        done = max(0, done - stage["steps"])
    stages = "; ".join(told)
    decay = f"over the last {plan['decay_steps']:,}"
    if begin.get("fit_minutes"):
        warm = (one for one in steps if one["step"] > plan["warmup_steps"])
        first = next((one["step"] for one in warm if one["rate_factor"] < 1), steps[-1]["step"])
        decay = f"by the clock, seen from step {first:,} on"
    shape = "linear" if (power := plan.get("decay_power", 1)) == 1 else f"(time left)^{power:g}"
    mix = ", ".join(f"{task} {share:.2f}" for task, share in settings["mix"].items())
    own = [str(at) for at, stage in enumerate(settings["stages"], 1) if stage.get("mix")]
    but = f" (not of stage {', '.join(own)}: see the settings)" if own else ""
    batch = settings["micro_batch_tokens"] * settings["micro_batches"]
    kind = "Qwen3-VL" if "vision" in settings else "Qwen3"
    by = settings.get("sharpen", 1)  # what ran before there was such a setting has none
    lines = [
        (
            f"{kind}: {model['layers']} layers, hidden {model['hidden']}, {model['heads']} query "
            f"and {model['kv_heads']} KV heads of {model['head_dim']}, feed-forward "
            f"{model['feed_forward']}, RoPE theta {model['rope_theta']:g}, "
            f"{model['positions']:,} positions, tied embeddings."
        ),
        f"{batch:,} tokens a step. Rows: {stages}.",
        f"Mix{but}: {mix}.",
        (
            f"Muon {plan['matrix_rate']} (momentum {plan['matrix_momentum']}, decay "
            f"{plan['matrix_decay']}) on matrices, AdamW {plan['other_rate']} on the rest; "
            f"{plan['warmup_steps']} steps of warm-up, {shape} decay {decay}."
        ),
        *_own(settings),
        *([f"Attention's logits times {by:g} at the end."] if by != 1 else []),
        f"Seed {settings['seed']}, commit {begin['commit']}.",
    ]
    return "\n".join(f"* {line}" for line in lines)


def _own(settings: Record) -> list[str]:
    """What runs of this kind have besides what all have."""
    if "corpus" in settings:
        return card_prose.recipe(settings)
    if "vision" in settings:
        return card_video.recipe(settings)
    return [_recall_rows(settings["rows"])]


def _recall_rows(rows: Record) -> str:
    times = rows.get("state_weight", 1)
    state = f"; {times:g} times as much behind a =" if times != 1 else ""
    return (
        f"Loss on answers, weighed as {rows['answer_floor']:g} to {rows['answer_cap']:g} "
        f"tokens each{state}; {rows['other_weight']} on {rows['other_share']:.1%} of the other "
        f"tokens. {rows['jump_share']:.0%} of the rows below {rows['jump_below']:,} tokens "
        f"have up to {rows['jumps']} jumps in their positions."
    )


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)
