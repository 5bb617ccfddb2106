"""A video reader in training: transformers' Qwen3-VL holds the parameters, our forward uses them.

Its text decoder is Qwen3's with positions on three axes (interleaved M-RoPE), so that
`training.model` has its layers. Frames of a batch are alike in size: the vision tower runs on
[frames, patches, hidden] at once, and visual tokens are put between their frames' text by slices.
There is no DeepStack.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from training.clips import CELL, Cast, pixel_table
from training.model import (
    Pieces,
    attention_backend,
    guess_logits,
    inverse_frequencies,
    through_layers,
    turns,
)
from training.settings import Architecture
from training.video_data import Grid
from training.video_settings import Vision
from training.video_words import BEFORE_FRAME, BOS, END, EOS, IMAGE, PAD, START, VIDEO

_MERGE = 2
_PATCH = CELL // _MERGE
_TABLE_SIDE = 16
"""Places of the table of patches' positions, on each axis."""
_EPS = 1e-6


def build(
    architecture: Architecture, vision: Vision, vocabulary: Mapping[str, int], seed: int
) -> Qwen3VLForConditionalGeneration:
    """A model with random weights, float32, on the CPU: normal with `init_std`, norms at one.

    The tower's matrices but the last are normal with 1 / sqrt(inputs): its activation functions
    bend then, and different pictures have different embeddings from the start.
    """
    pairs = architecture.head_dim // 2
    across = pairs * 5 // 16  # of height and of width, as Qwen3-VL's 20 of 64
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(vocabulary), "hidden_size": architecture.hidden,
            "intermediate_size": architecture.feed_forward,
            "num_hidden_layers": architecture.layers,
            "num_attention_heads": architecture.heads,
            "num_key_value_heads": architecture.kv_heads, "head_dim": architecture.head_dim,
            "max_position_embeddings": architecture.positions, "rms_norm_eps": _EPS,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": architecture.rope_theta,
                "mrope_interleaved": True, "mrope_section": [pairs - 2 * across, across, across],
            },
            "initializer_range": architecture.init_std, "tie_word_embeddings": True,
            "bos_token_id": vocabulary[BOS], "eos_token_id": vocabulary[EOS],
            "pad_token_id": vocabulary[PAD],
        },
        vision_config={
            "depth": vision.depth, "hidden_size": vision.hidden, "num_heads": vision.heads,
            "intermediate_size": vision.feed_forward, "patch_size": _PATCH,
            "temporal_patch_size": 1, "spatial_merge_size": _MERGE,
            "out_hidden_size": architecture.hidden, "deepstack_visual_indexes": [],
            "num_position_embeddings": _TABLE_SIDE * _TABLE_SIDE,
            "initializer_range": architecture.init_std,
        },
        image_token_id=vocabulary[IMAGE], video_token_id=vocabulary[VIDEO],
        vision_start_token_id=vocabulary[START], vision_end_token_id=vocabulary[END],
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                wide = ".visual." in name and name.endswith(".weight") and "pos_embed" not in name
                wide = wide and "merger.linear_fc2" not in name
                inputs = parameter[0].numel()
                std = inputs**-0.5 if wide else architecture.init_std
                parameter.normal_(0.0, std, generator=draw)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def patch_table(cast: Cast, device: torch.device | str) -> Tensor:
    """What the vision tower is given of each code: normalised pixels of its four patches.

    Returns:
        float32 [codes, 4, 3 * patch * patch]
    """
    pixels = torch.from_numpy(pixel_table(cast)).float() / 127.5 - 1
    cut = pixels.view(-1, _MERGE, _PATCH, _MERGE, _PATCH, 3).permute(0, 1, 3, 5, 2, 4)
    return cut.reshape(len(pixels), _MERGE * _MERGE, -1).contiguous().to(device)


class Places:
    """What clips of one grid have in common: positions across frames, on a device.

    Args:
        model: whose they are.
        grid: of the clips.
        length: tokens of a row.
        device: where they are used.
    """

    def __init__(
        self, model: Qwen3VLForConditionalGeneration, grid: Grid, length: int, device: torch.device
    ) -> None:
        config: Any = model.config
        side = grid.side
        cells = torch.arange(side * side)
        across = torch.zeros(3, length)
        start = BEFORE_FRAME + 1
        for frame in range(grid.frames):
            at = start + frame * grid.frame_tokens
            across[1, at : at + side * side] = (cells // side).float()
            across[2, at : at + side * side] = (cells % side).float()
        self.across = across[_axes(config.text_config)].T.contiguous().to(device)
        """What is added to a position on the axis of time. [length, head_dim / 2]"""
        # Patches come cell by cell, as Qwen3-VL's processor has them.
        inside = torch.arange(_MERGE * _MERGE)
        rows = (cells // side * _MERGE)[:, None] + inside // _MERGE
        columns = (cells % side * _MERGE)[:, None] + inside % _MERGE
        place = torch.stack([rows.flatten(), columns.flatten()])
        self.table, self.weights = (part.to(device) for part in _taps(place, side * _MERGE))
        vision = config.vision_config
        pairs = vision.hidden_size // vision.num_heads // 2
        even = torch.arange(0, pairs, 2, dtype=torch.float32)
        angles = (place.float()[:, :, None] / 10_000 ** (even / pairs)).permute(1, 0, 2).flatten(1)
        self.turns = tuple(part.to(device) for part in turns(angles, torch.float32))
        """Cosines and sines of patches. [patches, 1, head_dim]"""


def _axes(config: Any) -> list[int]:
    """Axis of each pair of components: time, height, width, time and so on (interleaved M-RoPE)."""
    pairs = config.head_dim // 2
    axes = [0] * pairs
    for axis, share in enumerate(config.rope_parameters["mrope_section"][1:], 1):
        for pair in range(axis, 3 * share, 3):
            axes[pair] = axis
    return axes


def _taps(place: Tensor, patches: int) -> tuple[Tensor, Tensor]:
    """Four entries of the table of positions for each patch, and their weights (bilinear).

    Args:
        place: row and column of each patch. [2, patches]
        patches: of a frame's side.
    """
    exact = place.float() * ((_TABLE_SIDE - 1) / max(1, patches - 1))
    low = exact.floor().long().clamp_max(_TABLE_SIDE - 1)
    high, part = (low + 1).clamp_max(_TABLE_SIDE - 1), exact - low
    entries, weights = [], []
    for row, by_row in ((low[0], 1 - part[0]), (high[0], part[0])):
        for column, by_column in ((low[1], 1 - part[1]), (high[1], part[1])):
            entries.append(row * _TABLE_SIDE + column)
            weights.append(by_row * by_column)
    return torch.stack(entries, dim=1), torch.stack(weights, dim=1)


def seen(
    model: Qwen3VLForConditionalGeneration, patches: Tensor, places: Places, dtype: torch.dtype
) -> Tensor:
    """Visual tokens of frames.

    Args:
        model: holds the parameters.
        patches: of `patch_table`, cell by cell. [frames, cells * 4, components]
        places: of these frames.
        dtype: of activations.

    Returns:
        [frames, cells, hidden], `dtype`.
    """
    tower: Any = model.model.visual
    embed = tower.patch_embed.proj
    frames, count, _ = patches.shape
    x = functional.linear(
        patches.to(dtype), embed.weight.flatten(1).to(dtype), embed.bias.to(dtype)
    )
    table = functional.embedding(places.table, tower.pos_embed.weight)
    x = x + (table * places.weights[:, :, None]).sum(1).to(dtype)
    cos, sin = places.turns
    for block in tower.blocks:
        h = _linear(_layer_norm(x, block.norm1), block.attn.qkv)
        q, k, v = h.view(frames, count, 3, block.attn.num_heads, -1).unbind(2)
        q, k = (_turned(part.float(), cos, sin).to(dtype) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        # Thousands of short rows, in many shapes: cuDNN would plan anew for each.
        with attention_backend("flash" if x.is_cuda else "auto"):
            mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + _linear(mixed.transpose(1, 2).reshape(frames, count, -1), block.attn.proj)
        h = functional.gelu(
            _linear(_layer_norm(x, block.norm2), block.mlp.linear_fc1), approximate="tanh"
        )
        x = x + _linear(h, block.mlp.linear_fc2)
    merger = tower.merger
    h = _layer_norm(x, merger.norm).view(frames, count // (_MERGE * _MERGE), -1)
    return _linear(functional.gelu(_linear(h, merger.linear_fc1)), merger.linear_fc2)


def embedded(
    model: Qwen3VLForConditionalGeneration, tokens: Tensor, visual: Tensor, grid: Grid,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Embeddings of rows, visual tokens in their places.

    Args:
        model: holds the parameters.
        tokens: int. [rows, length]
        visual: of `seen`, row by row. [rows * frames, cells, hidden]
        grid: of the clips.
        dtype: of activations.

    Returns:
        [rows, length, hidden], `dtype`.
    """
    embedding: Any = model.get_input_embeddings()
    x = functional.embedding(tokens, embedding.weight).to(dtype)
    rows, cells = len(tokens), grid.side * grid.side
    frames = x[:, 1 : grid.tokens].reshape(rows * grid.frames, grid.frame_tokens, -1)
    frames = torch.cat([frames[:, :BEFORE_FRAME], visual, frames[:, BEFORE_FRAME + cells :]], dim=1)
    clip = frames.view(rows, grid.tokens - 1, -1)
    return torch.cat([x[:, :1], clip, x[:, grid.tokens :]], dim=1)


def video_hidden(
    model: Qwen3VLForConditionalGeneration, tokens: Tensor, times: Tensor, patches: Tensor,
    grid: Grid, places: Places, pieces: Pieces, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """What stands behind the last norm, row by row.

    Args:
        model: holds the parameters, float32.
        tokens: int. [rows, length]
        times: positions on the axis of time. int [rows, length]
        patches: see `seen`.
        grid: of the clips.
        places: of the grid and the length.
        pieces: how the layers are computed.
        dtype: of activations.

    Returns:
        [rows * length, hidden], `dtype`.
    """
    decoder: Any = model.model.language_model
    x = embedded(model, tokens, seen(model, patches, places, dtype), grid, dtype)
    where = times.float()[:, :, None] + places.across
    angles = where.flatten(0, 1) * inverse_frequencies(decoder.config, x.device)
    cos, sin = turns(angles, dtype)
    return through_layers(decoder, x.flatten(0, 1), cos, sin, len(tokens), pieces)


def on_axes(times: Tensor, grid: Grid) -> Tensor:
    """Positions as transformers has them: time, height, width. int64 [3, rows, length]"""
    across = torch.zeros(3, times.shape[1], dtype=torch.int64)
    cells = torch.arange(grid.side * grid.side)
    for frame in range(grid.frames):
        at = 1 + BEFORE_FRAME + frame * grid.frame_tokens
        across[1, at : at + len(cells)] = cells // grid.side
        across[2, at : at + len(cells)] = cells % grid.side
    return times.long() + across[:, None].to(times.device)


def grids_of(grid: Grid, clips: int) -> Tensor:
    """What transformers calls `video_grid_thw`: patches of each clip; int64 [clips, 3]"""
    side = _MERGE * grid.side
    return torch.tensor([[grid.frames, side, side]] * clips)


@torch.no_grad()
def difference(
    model: Qwen3VLForConditionalGeneration, tokens: Tensor, times: Tensor, patches: Tensor,
    grid: Grid, pieces: Pieces, dtype: torch.dtype,
) -> float:  # fmt: skip
    """How far our logits are from those of transformers: the most, as a share of their range."""
    places = Places(model, grid, tokens.shape[1], tokens.device)
    hidden = video_hidden(model, tokens, times, patches, grid, places, pieces, dtype)
    everywhere = torch.arange(tokens.numel(), device=tokens.device)
    ours = guess_logits(model, hidden, everywhere)
    theirs = model(
        input_ids=tokens.long(), pixel_values_videos=patches.flatten(0, 1),
        video_grid_thw=grids_of(grid, len(tokens)).to(tokens.device),
        position_ids=on_axes(times, grid), use_cache=False,
    ).logits.float().flatten(0, 1)  # fmt: skip
    return float((ours - theirs).abs().max() / (theirs.max() - theirs.min()))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _layer_norm(x: Tensor, norm: Any) -> Tensor:
    weight, bias = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
    return functional.layer_norm(x, weight.shape, weight, bias, norm.eps)


def _linear(x: Tensor, layer: Any) -> Tensor:
    return functional.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))
