"""Pictures and videos: from files, folders of frames or objects, to arrays of pixels."""

import base64
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, PromptError

FRAMES_PER_S = 2.0
"""Taken of a folder of frames, of which nothing says it, and from a file, where the processor's
settings do not say it: as Qwen's own tools sample."""
_EXTRA = "pip install 'penstock[vision]'"
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class Picture(NamedTuple):
    """A picture that was read."""

    pixels: NDArray[np.uint8]
    """RGB. [height, width, 3]"""
    picture: Any
    """The same as an image of Pillow."""


class Frames(NamedTuple):
    """A video that was sampled."""

    pixels: NDArray[np.uint8]
    """RGB. [frames, height, width, 3]"""
    frames_per_s: float
    """Of the video that the numbers count in."""
    numbers: list[int]
    """Of the frames, in the video."""
    total: int
    """Frames of the video."""


def read_image(source: Any) -> Picture:
    """A picture's pixels.

    Args:
        source: a path, "data:image/...;base64,...", an image of Pillow, or an array or tensor,
            uint8 RGB [height, width, 3].

    Raises:
        PromptError: it cannot be read, or is no picture.
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(f"Pillow, which reads pictures, is not installed: {_EXTRA}") from error
    picture = _opened(source) if isinstance(source, str | Path) else source
    if isinstance(picture, Image.Image):
        picture = picture.convert("RGB")
        return Picture(np.asarray(picture), picture)
    pixels = np.asarray(picture)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise PromptError(
            "a picture is a path, an image of Pillow, or uint8 [height, width, 3], not "
            f"{type(source).__name__} of {pixels.dtype} {list(pixels.shape)}"
        )
    return Picture(pixels, Image.fromarray(pixels))


def read_video(source: Any, sample: Callable[[Any], Sequence[int]] | None) -> Frames:
    """A video's frames.

    Args:
        source: a path of a file or of a folder of frames, in order of their names; or frames: a
            list of what `read_image` reads, or an array or tensor, uint8 RGB [frames, height,
            width, 3].
        sample: chooses frames of a file by its metadata; None: all.

    Raises:
        PromptError: it cannot be read, or is no video.
        ConfigError: what reads it is not installed.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        if not path.is_dir():
            return _read_file(path, sample)
        names = sorted(each for each in path.iterdir() if each.suffix.lower() in _PICTURES)
        if not names:
            raise PromptError(f"{path}: the folder has no frames ({', '.join(_PICTURES)})")
        source = names
    elif getattr(source, "ndim", 0) == 4:
        source = np.asarray(source)
    if not isinstance(source, list | tuple | np.ndarray) or not len(source):
        raise PromptError(f"a video is a path, or a list of frames, not {type(source).__name__}")
    frames = [read_image(each).pixels for each in source]
    if len({each.shape for each in frames}) > 1:
        raise PromptError("frames of a video are of different sizes")
    return Frames(np.stack(frames), FRAMES_PER_S, list(range(len(frames))), len(frames))


def _opened(source: str | Path) -> Any:
    """An image of Pillow out of a file, or of a data URL."""
    from PIL import Image, UnidentifiedImageError

    name = str(source)
    if name.startswith(("http://", "https://")):
        raise PromptError(f"{name}: nothing is fetched for a prompt; give a file")
    shown, file = name, Path(name.removeprefix("file://"))
    content: Any = file
    if name.startswith("data:"):
        shown = f"{name[:24]}..."
        content = io.BytesIO(_decoded(name))
    try:
        with Image.open(content) as image:
            return image.convert("RGB")
    except UnidentifiedImageError as error:
        raise PromptError(f"{shown} is no picture that can be read") from error
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        said = getattr(error, "strerror", None) or error
        raise PromptError(f"cannot read the picture {shown}: {said}") from error


def _decoded(url: str) -> bytes:
    head, _, body = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise PromptError("a data URL of a picture is data:image/png;base64,...") from error


def _read_file(path: Path, sample: Callable[[Any], Sequence[int]] | None) -> Frames:
    if not os.path.isfile(path):
        raise PromptError(f"cannot read the video {path}: there is no such file")
    try:
        from transformers.video_utils import load_video

        chosen = None if sample is None else lambda metadata, **_: np.asarray(sample(metadata))
        pixels, said = load_video(str(path), backend="pyav", sample_indices_fn=chosen)
    except ImportError as error:
        raise ConfigError(
            f"PyAV, which reads video files, is not installed: {_EXTRA}; or give a folder of frames"
        ) from error
    except Exception as error:  # whatever a decoder raises
        raise PromptError(f"cannot read the video {path}: {error}") from error
    numbers = getattr(said, "frames_indices", None)
    total, rate = int(said.total_num_frames), float(said.fps or FRAMES_PER_S)
    numbers = range(len(pixels)) if numbers is None else numbers
    return Frames(np.asarray(pixels), rate, [int(each) for each in numbers], total)
