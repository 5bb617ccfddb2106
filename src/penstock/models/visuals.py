"""Visual: a picture or video in a prompt: its tokens, its identity, and what the model needs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.core.errors import PromptError

_NOT_OF_PICTURES = ("input_ids", "attention_mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class Visual:
    """A picture, a video, or several that came as one."""

    start: int
    """First of its tokens in a prompt."""
    end: int
    """Behind the last one."""
    digest: str
    """Of its pixels, the processor's settings and the sampling of frames, in hexadecimal."""
    tensors: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)
    """What the processor made of it, for the model's `forward`; None where keys and values are
    stored, and pixels are not."""
    kinds: Mapping[str, Mapping[int, int]] = field(default_factory=dict, compare=False, repr=False)
    """By argument of `forward`: what each token id is there (`mm_token_type_ids`); others are 0."""

    def moved(self, tokens: int) -> "Visual":
        """The same, so many tokens later."""
        return replace(self, start=self.start + tokens, end=self.end + tokens)

    def without_pixels(self) -> "Visual":
        """As a stored document has it."""
        return replace(self, tensors=None)


def visual_tokens(model: PreTrainedModel) -> frozenset[int]:
    """The token ids in whose places pictures and videos are put."""
    fields = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
    found = (getattr(model.config, name, None) for name in fields)
    return frozenset(token for token in found if isinstance(token, int))


def processed_visuals(
    model: PreTrainedModel, ids: Sequence[int], made: Mapping[str, Any], digest: str | None = None
) -> tuple[Visual, ...]:
    """What a processor made of a prompt and its pictures, as one visual; none without pictures.

    Args:
        ids: of the prompt.
        made: what the processor returned.
        digest: of what went into it; None: what came out is digested.

    Raises:
        PromptError: the prompt has no place for what was made.
    """
    tensors = {name: _tensor(name, value) for name, value in made.items() if value is not None}
    tensors = {name: each for name, each in tensors.items() if name not in _NOT_OF_PICTURES}
    kinds = {name: each for name, each in tensors.items() if _is_of_tokens(each, len(ids))}
    tensors = {name: each for name, each in tensors.items() if name not in kinds}
    if not tensors:
        return ()
    places = [at for at, token in enumerate(ids) if token in visual_tokens(model)]
    if not places:
        raise PromptError(
            "the prompt has pictures, but no token for them to stand at; put the model's "
            "placeholder into its text, or messages with parts of type image or video"
        )
    return (
        Visual(
            start=places[0], end=places[-1] + 1,
            digest=_digest(tensors) if digest is None else digest, tensors=tensors,
            kinds={
                name: {token: int(kind) for token, kind in zip(ids, each.view(-1).tolist(),
                                                               strict=True) if kind}
                for name, each in kinds.items()
            },
        ),
    )  # fmt: skip


def model_arguments(ids: Sequence[int], visuals: Sequence[Visual]) -> dict[str, Tensor]:
    """What `forward` takes of the visuals of one row, beside its tokens.

    Args:
        ids: of the row, all of whose visuals are given.

    Raises:
        PromptError: pixels of a visual are not there any more, or visuals do not fit together.
    """
    found: dict[str, list[Tensor]] = {}
    kinds: dict[str, dict[int, int]] = {}
    for visual in visuals:
        if visual.tensors is None:
            raise PromptError(
                f"the picture at tokens {visual.start:,} to {visual.end:,} would be read again, "
                "and its pixels are not stored; add the text and its pictures anew"
            )
        for name, each in visual.tensors.items():
            found.setdefault(name, []).append(each)
        for name, known in visual.kinds.items():
            kinds.setdefault(name, {}).update(known)
    try:
        arguments = {name: torch.cat(each) for name, each in found.items()}
    except RuntimeError as error:
        raise PromptError(f"the prompt's pictures do not fit together: {error}") from error
    for name, known in kinds.items():
        arguments[name] = torch.tensor([[known.get(token, 0) for token in ids]])
    return arguments


def common_beginning(
    tokens: Sequence[int], visuals: Sequence[Visual],
    others: Sequence[int], other_visuals: Sequence[Visual],
) -> int:  # fmt: skip
    """How many tokens two rows begin with both, pictures compared by what they show; a picture
    that does not end among them is not begun."""
    pairs = enumerate(zip(tokens, others, strict=False))
    common = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))
    both = list(zip(visuals, other_visuals, strict=False))
    same = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
    for visual in (*visuals[same:], *other_visuals[same:]):
        common = min(common, visual.start)
    return whole_visuals(visuals, common)


def encoder_digest(config: Any) -> str:
    """Of all of a model's configuration but the text decoder's: what its pictures depend on beside
    weights and pixels."""
    said = config.to_dict()
    for name in ("text_config", "_name_or_path", "transformers_version", "dtype", "architectures"):
        said.pop(name, None)
    return digest_of([json.dumps(said, sort_keys=True, default=str).encode()])


def whole_visuals(visuals: Sequence[Visual], count: int) -> int:
    """So many first tokens, or less: down to the beginning of a picture that they would cut."""
    return next((each.start for each in visuals if each.start < count < each.end), count)


def digest_of(parts: Sequence[bytes]) -> str:
    """Of some bytes, each told apart from the next. 32 hexadecimal digits"""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.hexdigest()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    parts: list[bytes] = []
    for name, each in sorted(tensors.items()):
        flat = each.detach().cpu().contiguous()
        parts += [f"{name} {flat.dtype} {tuple(flat.shape)}".encode(),
                  flat.view(-1).view(torch.uint8).numpy().tobytes()]  # fmt: skip
    return digest_of(parts)


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(
            f"{name} of the processor is no tensor; call it with return_tensors='pt'"
        ) from error


def _is_of_tokens(each: Tensor, count: int) -> bool:
    return not each.is_floating_point() and tuple(each.shape) == (1, count)
