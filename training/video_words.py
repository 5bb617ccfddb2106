"""The words of a video reader, and its tokenizer: what Qwen3-VL's processor writes for a clip.

That processor writes `<137.0 seconds>`, a token for the frame's start, its visual tokens and one
for its end, for each frame. The words here are whole except for digits.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.clips import CELL, COLOURS, SHAPES

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
START, END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
SECONDS = ".0 seconds>"
BEFORE_FRAME, BEHIND_FRAME = 6, 1
"""Tokens around a frame's visual ones: `<`, three digits, `.0 seconds>`, start; and end."""
_SPECIAL = (PAD, BOS, EOS, UNKNOWN, START, END, IMAGE, VIDEO)
_TEXT = (
    "What", "When", "How", "often", "In", "which", "order", "appeared", "appear", "did", "came",
    "after", "at", "the", "colours", "of", "?", ",", ":", "<",
)  # fmt: skip
_MERGE = 2


def vocabulary() -> dict[str, int]:
    """Words with their ids."""
    words = [*_SPECIAL, *map(str, range(10)), *_TEXT, SECONDS, *COLOURS, *SHAPES]
    return {word: at for at, word in enumerate(dict.fromkeys(words))}


def write_processor(folder: Path) -> Path:
    """Write the tokenizer and the settings of Qwen3-VL's processor.

    Args:
        folder: is made.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pixels = {
        "patch_size": CELL // _MERGE, "temporal_patch_size": 1, "merge_size": _MERGE,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True,
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": CELL * CELL, "longest_edge": 1 << 26},
    }  # fmt: skip
    files: dict[str, dict[str, Any]] = {
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "Qwen3VLProcessor",
            "bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNKNOWN,
            "model_max_length": 40960, "clean_up_tokenization_spaces": False,
        },
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessorFast", **pixels},
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor", "do_sample_frames": False, **pixels
        },
        "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
    }  # fmt: skip
    for name, content in files.items():
        text = json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _tokenizer() -> dict[str, Any]:
    known: Mapping[str, int] = vocabulary()
    split = r"\.0 seconds>|[0-9]|<|[?,:]|[^\s0-9?,:<]+"
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    one, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "decoder": None,
        "added_tokens": [
            {
                "id": known[word], "content": word, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": True,
            }
            for word in _SPECIAL
        ],
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": split}, "behavior": "Removed", "invert": True
        },
        "post_processor": {
            "type": "TemplateProcessing", "single": [bos, one], "pair": [bos, one, other],
            "special_tokens": {BOS: {"id": BOS, "ids": [known[BOS]], "tokens": [BOS]}},
        },
        "model": {"type": "WordLevel", "vocab": dict(known), "unk_token": UNKNOWN},
    }  # fmt: skip
