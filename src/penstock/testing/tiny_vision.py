"""tiny_vision_model(): random models of several families that see, with their processors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    Gemma3Config,
    Gemma3ImageProcessor,
    Gemma3Processor,
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLProcessor,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
)

from penstock.models.loader import LoadedModel
from penstock.testing.tiny_chat import byte_tokenizer

_SIDE = 56
"""Of a picture, in pixels, for those processors that make all alike."""
_TOKENS = ("<image>", "<video>", "<|vision_start|>", "<|vision_end|>", "<start_of_image>",
           "<end_of_image>")  # fmt: skip
IMAGE, VIDEO, START, END, FIRST, LAST = _TOKENS

_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '@image@' }}"
    "{% elif part['type'] == 'video' %}{{ '@video@' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class FrameProcessor:
    """Stands in for Qwen's video processor, which wants torchvision: each frame is prepared as a
    picture, and is a patch of time by itself."""

    merge_size, temporal_patch_size = 2, 2

    def __init__(self, images: Any) -> None:
        self._images = images

    def __call__(self, videos: Any, video_metadata: Any = None, **_: Any) -> dict[str, Any]:
        """Patches of all frames, and their grids."""
        made = [self._images(list(frames), return_tensors="pt") for frames in videos]
        grids = [
            torch.tensor([len(each["image_grid_thw"]), *each["image_grid_thw"][0][1:].tolist()])
            for each in made
        ]
        metadata = [_Metadata(**each) for each in video_metadata or ()]
        return {
            "pixel_values_videos": torch.cat([each["pixel_values"] for each in made]),
            "video_grid_thw": torch.stack(grids), "video_metadata": metadata,
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Settings, as a processor of transformers gives them."""
        return dict(self._images.to_dict())

    def __repr__(self) -> str:
        return "FrameProcessor()"


class _Metadata:
    def __init__(self, total_num_frames: int, fps: float, frames_indices: list[int]) -> None:
        self.fps, self.sampled_fps = fps, fps * len(frames_indices) / total_num_frames
        # Each frame is one patch of time, which the processor takes two for.
        self.frames_indices = [number for number in frames_indices for _ in range(2)]


def _without_videos(kind: type[Any]) -> type[Any]:
    """A processor's class that can be made without the video processor of its family."""

    class Own(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name == "video_processor":
                return None
            return super().check_argument_for_proper_class(name, argument)

    Own.__name__ = kind.__name__
    return Own


def _text(size: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": size, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, **more,
    }  # fmt: skip


def _tower(**more: Any) -> dict[str, Any]:
    return {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 48, "image_size": _SIDE, "patch_size": 14, **more}  # fmt: skip


def _qwen(kind: type[Any], ids: Mapping[str, int], text: dict[str, Any], **tower: Any) -> Any:
    axes = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    sizes = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
             "out_hidden_size": 64, "patch_size": 14, **tower}  # fmt: skip
    return kind(
        text_config={**text, "rope_parameters": axes}, vision_config=sizes,
        image_token_id=ids[IMAGE], video_token_id=ids[VIDEO], vision_start_token_id=ids[START],
        vision_end_token_id=ids[END], tie_word_embeddings=False,
    )  # fmt: skip


def _config(family: str, ids: Mapping[str, int]) -> PreTrainedConfig:
    size = len(ids)
    if family == "qwen2_5_vl":
        return _qwen(
            Qwen2_5_VLConfig, ids, _text(size), window_size=56, fullatt_block_indexes=[1],
            tokens_per_second=2,
        )  # fmt: skip
    if family == "qwen3_vl":
        return _qwen(
            Qwen3VLConfig, ids, _text(size, head_dim=16), num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
        )  # fmt: skip
    if family == "internvl":
        return InternVLConfig(
            text_config=_text(size, model_type="qwen2"), image_token_id=ids[IMAGE],
            vision_config=_tower(image_size=[_SIDE, _SIDE], patch_size=[14, 14]),
            downsample_ratio=0.5,
        )  # fmt: skip
    if family == "llava":
        return LlavaConfig(
            text_config=_text(size, model_type="llama"), image_token_index=ids[IMAGE],
            vision_config=_tower(model_type="clip_vision_model", projection_dim=32),
            vision_feature_layer=-2,
        )  # fmt: skip
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    return Gemma3Config(
        text_config=_text(size, head_dim=16, sliding_window=24, layer_types=kinds),
        vision_config=_tower(), image_token_index=ids[IMAGE], boi_token_index=ids[FIRST],
        eoi_token_index=ids[LAST], mm_tokens_per_image=4,
    )  # fmt: skip


def _qwen_processor(kind: type[Any]) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        tokenizer.image_token, tokenizer.video_token = IMAGE, VIDEO
        images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=112 * 112)
        processor = _without_videos(kind)(images, tokenizer, None)
        processor.video_processor = FrameProcessor(images)
        return processor

    return make


def _internvl_processor(tokenizer: Any) -> Any:
    names = {"start_image_token": START, "end_image_token": END, "context_image_token": IMAGE,
             "video_token": VIDEO}  # fmt: skip
    for name, token in names.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    size = {"height": _SIDE, "width": _SIDE}
    images = GotOcr2ImageProcessor(size=size, crop_to_patches=False)
    return _without_videos(InternVLProcessor)(images, tokenizer, None, image_seq_length=4)


def _llava_processor(tokenizer: Any) -> Any:
    images = CLIPImageProcessor(
        size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}
    )
    return LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default",
        image_token=IMAGE, num_additional_image_tokens=1,
    )  # fmt: skip


def _gemma_processor(tokenizer: Any) -> Any:
    for name, token in {"image_token": IMAGE, "boi_token": FIRST, "eoi_token": LAST}.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    images = Gemma3ImageProcessor(size={"height": _SIDE, "width": _SIDE})
    return Gemma3Processor(images, tokenizer, image_seq_length=4)


VISION_FAMILIES: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "qwen2_5_vl": _qwen_processor(Qwen2_5_VLProcessor),
        "qwen3_vl": _qwen_processor(Qwen3VLProcessor),
        "internvl": _internvl_processor,
        "llava": _llava_processor,
        "gemma3": _gemma_processor,
    }
)
"""What makes a processor of a tokenizer, by family."""


def tiny_vision_model(family: str, seed: int = 0, folder: Path | None = None) -> LoadedModel:
    """A random model of a family that sees, in float32, with a tokenizer of bytes and a processor.

    Weights are larger than an initialiser's, so that attention differs visibly between tokens.

    Args:
        folder: where model and processor are saved too; for families without videos.
    """
    tokenizer: Any = byte_tokenizer(None)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*tokenizer.all_special_tokens, *_TOKENS]}
    )
    processor = VISION_FAMILIES[family](tokenizer)
    image = getattr(processor, "boi_token", IMAGE)
    marks = {"@image@": f"{START}{image}{END}", "@video@": f"{START}{VIDEO}{END}"}
    if family in ("internvl", "llava", "gemma3"):
        marks = {"@image@": image, "@video@": VIDEO}
    template = _TEMPLATE
    for mark, text in marks.items():
        template = template.replace(mark, text)
    tokenizer.chat_template = processor.chat_template = template
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.get_vocab()}
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(_config(family, ids)).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.normal_(0.0, 0.1, generator=draw)
        special = [ids[token] for token in (*tokenizer.all_special_tokens, *_TOKENS)]
        model.get_output_embeddings().weight[special] = 0  # an answer begins no picture
    if folder is not None:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    return LoadedModel(model=model, tokenizer=tokenizer, name=f"tiny-{family}", processor=processor)


def tiny_picture(seed: int, height: int = _SIDE, width: int = _SIDE) -> Any:
    """A picture of noise in blocks. uint8 [height, width, 3]"""
    draw = torch.Generator().manual_seed(seed)
    blocks: Tensor = torch.randint(0, 256, (height // 14, width // 14, 3), generator=draw)
    whole = blocks.repeat_interleave(14, dim=0).repeat_interleave(14, dim=1)
    return whole.to(torch.uint8).numpy()
