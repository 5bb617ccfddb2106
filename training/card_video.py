"""Parts of a video reader's card: its tower and clips, its rows, and accuracy by policy."""

from collections.abc import Mapping
from typing import Any

from penstock.evaluate.result import Result
from training.evaluate_video import table

Record = Mapping[str, Any]
NATURE = (
    "It is not a model for people's videos: it answers five kinds of questions about synthetic "
    "clips (`training/clips.py`), in the words it was trained on and no others. It is made to be "
    "measured: each answer is right or wrong."
)


def accuracy(evaluation: Result | None) -> str:
    """Exact match under full attention and under every policy and budget that was asked."""
    if evaluation is None:
        return "Not measured."
    cells, plan = evaluation.figures["cells"], evaluation.settings
    most = max((cell["asked"] for cell in cells), default=0)
    return (
        f"Exact match by policy and budget; columns are tasks and visual tokens of the clip. Up to "
        f"{most} fresh clips a cell with one question each, seed {evaluation.seed}, "
        f"{plan['device']}, {plan['dtype']}; all tokens of an answer the likeliest, the right ones "
        f"given (greedy decoding would have said the same).\n\n```\n{table(cells)}\n```\n\n"
        f"Command: `{evaluation.command}`, commit {evaluation.commit}."
    )


def recipe(settings: Record) -> list[str]:
    """What a video run has besides what all have."""
    vision, cast, rows = settings["vision"], settings["cast"], settings["rows"]
    sides = "; ".join(
        " or ".join(f"{side}x{side}" for side in stage["sides"]) for stage in settings["stages"]
    )
    return [
        (
            f"Vision tower: {vision['depth']} layers, hidden {vision['hidden']}, {vision['heads']} "
            f"heads, feed-forward {vision['feed_forward']}, patches of 4 pixels, four of which "
            "become a token. The decoder has M-RoPE as Qwen3-VL, without DeepStack."
        ),
        (
            f"Clips: {cast['colours']} colours, {cast['shapes']} shapes, one frame a second; "
            f"visual tokens of a frame, by stage: {sides}."
        ),
        (
            f"Loss on answers, weighed as at least {rows['answer_floor']:g} tokens each; "
            f"{rows['other_weight']} on {rows['other_share']:.1%} of the other tokens of text. At "
            f"most {rows['questions']:,} tokens of questions a row. {rows['jump_share']:.0%} of "
            f"the rows have up to {rows['jumps']} jumps in their positions, to at most "
            f"{rows['jump_to']:,}."
        ),
    ]
