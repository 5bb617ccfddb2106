"""encode_with_media(): a text and what stands at its placeholders, by the model's own processor."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import PromptError
from penstock.models.load_errors import said_of
from penstock.models.media import FRAMES_PER_S, read_image, read_video
from penstock.models.visuals import Visual, digest_of, processed_visuals, visual_tokens

if TYPE_CHECKING:
    from penstock.models.loader import LoadedModel

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")
_MARKS = {"image": ("boi_token", "image_token"), "video": ("video_token",)}
"""By kind: what a processor calls its placeholder, if it has the first of them."""


class Media(NamedTuple):
    """A picture or a video of a prompt."""

    kind: Kind
    source: Any
    """What `read_image` or `read_video` takes."""

    @classmethod
    def of_data(cls, data: Any) -> list["Media"]:
        """Those of a `multi_modal_data`: one or a list for each kind.

        Raises:
            PromptError: it has other kinds.
        """
        if not isinstance(data, Mapping) or not set(data) <= set(KINDS):
            raise PromptError('multi_modal_data is {"image": ..., "video": ...}, and nothing else')
        found = []
        for kind in KINDS:
            given = data.get(kind)
            several = isinstance(given, list | tuple) and not (
                kind == "video" and _is_frames(given)
            )
            sources = [] if given is None else list(given) if several else [given]
            found += [cls(kind, source) for source in sources]
        return found


class Drawn(NamedTuple):
    """A picture or video that has been through the processor."""

    kind: Kind
    text: str
    """Its placeholder, drawn out to as many as it has tokens, and what the processor writes
    between them."""
    tokens: int
    """Its tokens that are placeholders."""
    visual: Visual
    """In places of its own."""


class EncodedText(NamedTuple):
    """Token ids of a text, and the pictures in it."""

    ids: list[int]
    visuals: list[Visual]


def _is_frames(given: Sequence[Any]) -> bool:
    """Whether a list is one video: of images, and not of paths or of lists."""
    return all(hasattr(each, "convert") or getattr(each, "ndim", 0) == 3 for each in given)


def placeholder(loaded: "LoadedModel", kind: Kind) -> str:
    """What stands in a text for a picture or video.

    Raises:
        PromptError: the model takes none.
    """
    if loaded.processor is None:
        raise PromptError(
            f"{loaded.name} takes no {kind}s: it is a language model alone, or came without its "
            "processor"
        )
    for name in _MARKS[kind]:
        marker = getattr(loaded.processor, name, None)
        if isinstance(marker, str):
            return marker
    raise PromptError(f"{loaded.name} takes no {kind}s: its processor has no token for one")


def encode_with_media(
    loaded: "LoadedModel", text: str, media: Sequence[Media | Drawn], *, alone: bool
) -> EncodedText:
    """Token ids of a text with its placeholders drawn out.

    Each picture goes through the processor by itself: a prompt that goes on from a stored one
    prepares only what is new, and a picture is known again wherever it stands.

    Args:
        media: those of each kind in the order of their placeholders.
        alone: with the tokens that the tokenizer puts around a text.

    Raises:
        PromptError: placeholders and pictures do not match, a picture cannot be read, or the model
            takes none.
    """
    drawn = [draw(loaded, each) if isinstance(each, Media) else each for each in media]
    return encode_drawn(loaded, *draw_out(loaded, text, drawn), alone=alone)


def draw(loaded: "LoadedModel", media: Media) -> Drawn:
    """Have a picture or video prepared by the model's processor.

    Raises:
        PromptError: it cannot be read, or the model takes none.
        ConfigError: what reads it is not installed.
    """
    marker, processor = placeholder(loaded, media.kind), loaded.processor
    # Older releases write Qwen3-VL's times only where a whole prompt is given.
    in_whole = hasattr(processor, "vision_start_token")
    if media.kind == "video" and in_whole and not hasattr(processor, "replace_video_token"):
        raise PromptError(
            f"{loaded.name}'s videos want a newer transformers; or give what its processor makes "
            "of the prompt"
        )
    given, parts = _prepared(processor, media)
    try:
        made = processor(text=[marker], add_special_tokens=False, return_tensors="pt", **given)
        ids = [int(token) for token in made["input_ids"][0]]
        text = _as_text(processor.tokenizer, ids, marker)
    except PromptError:
        raise
    except Exception as error:  # whatever a processor's code raises
        raise PromptError(
            f"{loaded.name} cannot take the {media.kind}: {said_of(error)}"
        ) from error
    [visual] = processed_visuals(loaded.model, ids, made, digest_of(parts))
    count = sum(token in visual_tokens(loaded.model) for token in ids)
    return Drawn(media.kind, text, count, visual)


def draw_out(loaded: "LoadedModel", text: str, drawn: Sequence[Drawn]) -> tuple[str, list[Drawn]]:
    """A text with its placeholders drawn out, and what stands there in the order of the text.

    Raises:
        PromptError: it has more or fewer placeholders.
    """
    found: list[tuple[int, str, Drawn]] = []
    for kind in KINDS:
        given = [each for each in drawn if each.kind == kind]
        if not given:
            continue
        marker = placeholder(loaded, kind)
        places = _places(text, marker)
        if len(places) != len(given):
            raise PromptError(
                f"{len(given)} {kind}s are given, and the text has {len(places)} places for one: "
                f"write {marker} where each stands"
            )
        found += [(place, marker, each) for place, each in zip(places, given, strict=True)]
    pieces, at = [], 0
    for place, marker, each in sorted(found, key=lambda one: one[0]):
        pieces += [text[at:place], each.text]
        at = place + len(marker)
    ordered = [each for _, _, each in sorted(found, key=lambda one: one[0])]
    return "".join([*pieces, text[at:]]), ordered


def encode_drawn(
    loaded: "LoadedModel", text: str, drawn: Sequence[Drawn], *, alone: bool
) -> EncodedText:
    """Token ids of a text whose placeholders are drawn out.

    Args:
        drawn: what stands there, in the order of the text.

    Raises:
        PromptError: the text has other placeholders too.
    """
    tokenizer: Any = loaded.tokenizer
    encoded = tokenizer(text, add_special_tokens=alone, verbose=False)["input_ids"]
    ids = [int(token) for token in encoded]
    places = [i for i, token in enumerate(ids) if token in visual_tokens(loaded.model)]
    total = sum(each.tokens for each in drawn)
    if len(places) != total:
        raise PromptError(
            f"the text has {len(places):,} tokens of pictures, and its pictures have {total:,}"
        )
    visuals, first = [], 0
    for each in drawn:
        start, last = places[first], places[first + each.tokens - 1]
        visuals.append(replace(each.visual, start=start, end=last + 1))
        first += each.tokens
    return EncodedText(ids, visuals)


def _places(text: str, marker: str) -> list[int]:
    places, at = [], text.find(marker)
    while at >= 0:
        places.append(at)
        at = text.find(marker, at + len(marker))
    return places


def _prepared(processor: Any, media: Media) -> tuple[dict[str, Any], list[bytes]]:
    """What the processor is called with, and all that its result depends on."""
    part = getattr(processor, f"{media.kind}_processor", None)
    settings = {} if part is None else part.to_dict()
    parts = [media.kind.encode(), type(processor).__name__.encode(),
             json.dumps(settings, sort_keys=True, default=str).encode()]  # fmt: skip
    if media.kind == "image":
        image = read_image(media.source)
        return {"images": [[image.picture]]}, [*parts, *_bytes_of(image.pixels)]
    frames = read_video(media.source, _sampler(part))
    metadata = {
        "total_num_frames": frames.total, "fps": frames.frames_per_s,
        "frames_indices": frames.numbers,
    }  # fmt: skip
    given = {
        "videos": [frames.pixels], "video_metadata": [metadata], "do_sample_frames": False,
    }  # fmt: skip
    said = json.dumps(metadata, sort_keys=True).encode()
    return given, [*parts, said, *_bytes_of(frames.pixels)]


def _sampler(part: Any) -> Callable[[Any], Sequence[int]] | None:
    """How a video processor chooses the frames of a file: by its settings, or else so many a
    second; None: it takes all."""
    sample = getattr(part, "sample_frames", None)
    if sample is None:
        return None
    said = getattr(part, "fps", None) or getattr(part, "num_frames", None)
    return partial(sample) if said else partial(sample, fps=FRAMES_PER_S)


def _bytes_of(pixels: NDArray[np.uint8]) -> list[bytes]:
    return [str(pixels.shape).encode(), pixels.tobytes()]


def _as_text(tokenizer: Any, ids: Sequence[int], marker: str) -> str:
    """A text that the tokenizer encodes as these tokens."""
    again = partial(tokenizer, add_special_tokens=False, verbose=False)
    exactly = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    for text in (marker * len(ids), tokenizer.decode(ids, **exactly)):
        if list(again(text)["input_ids"]) == list(ids):
            return str(text)
    raise PromptError("the processor's tokens for a picture are no text of its tokenizer")
