"""The compiled CPU kernels, when they were built on installation; every one has a torch twin."""

import ctypes
import functools
import hashlib
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # hatch_build.py uses this file where nothing is installed
    from numpy.typing import NDArray

_FOLDER = Path(__file__).parent
_ADDRESS, _COUNT, _FACTOR = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

_SIGNATURES: Mapping[str, tuple[type, ...]] = MappingProxyType({
    "group_scores": (_ADDRESS, *4 * (_COUNT,), _ADDRESS, *5 * (_COUNT,), *2 * (_ADDRESS,)),
    "turned_scores": (*3 * (_ADDRESS,), *2 * (_COUNT,), *2 * (_ADDRESS,)),
    "turned_logits": (*3 * (_ADDRESS,), _COUNT, *2 * (_ADDRESS,)),
    "top_units": (_ADDRESS, *3 * (_COUNT,), *2 * (_ADDRESS,)),
    "plan_fifo_fetch": (*2 * (_ADDRESS,), *4 * (_COUNT,), *9 * (_ADDRESS,)),
    "plan_cluster_fetch": (*2 * (_ADDRESS,), *4 * (_COUNT,), *13 * (_ADDRESS,)),
    "store_codes": (_ADDRESS, *7 * (_COUNT,), _ADDRESS),
    "coalesce": (*2 * (_ADDRESS,), *2 * (_COUNT,), *4 * (_ADDRESS,)),
    "copy_runs": (*3 * (_ADDRESS,), _COUNT),
    "number_blocks": (*2 * (_ADDRESS,), *3 * (_COUNT,), _ADDRESS),
    "mask_runs": (*2 * (_ADDRESS,), *3 * (_COUNT,), *2 * (_ADDRESS,), _COUNT),
    "put_token": (
        *2 * (_ADDRESS,), *2 * (_COUNT,), _ADDRESS, _COUNT, _ADDRESS, *2 * (_COUNT,),
    ),
    "check_events": (_ADDRESS, *2 * (_COUNT,), *2 * (_ADDRESS,)),
    "rms_norm": (*2 * (_ADDRESS,), _FACTOR, *3 * (_COUNT,), _ADDRESS),
    "turn_query": (*2 * (_ADDRESS,), _FACTOR, *2 * (_ADDRESS,), *4 * (_COUNT,), _ADDRESS),
    "low_rank": (_ADDRESS, *5 * (_COUNT,), _ADDRESS, *2 * (_COUNT,), *2 * (_ADDRESS,)),
    "int8_linear": (*3 * (_ADDRESS,), *3 * (_COUNT,), _ADDRESS),
    "int8_groups": (*3 * (_ADDRESS,), *4 * (_COUNT,), _ADDRESS),
    "int4_groups": (*3 * (_ADDRESS,), *5 * (_COUNT,), *2 * (_ADDRESS,)),
    "unpack_int4": (*2 * (_ADDRESS,), *5 * (_COUNT,), _ADDRESS),
    "predict_query": (*4 * (_ADDRESS,), _COUNT, *2 * (_ADDRESS,)),
    "select_groups": (
        *2 * (_ADDRESS,), *4 * (_COUNT,), _ADDRESS, _COUNT, _FACTOR, *2 * (_ADDRESS,),
    ),
    "fetch_groups": (*3 * (_ADDRESS,), *7 * (_COUNT,), *2 * (_ADDRESS,)),
    "plan_reads": (*2 * (_ADDRESS,), *5 * (_COUNT,), *2 * (_ADDRESS,)),
    "fill_iocbs": (*3 * (_ADDRESS,), *3 * (_COUNT,), *2 * (_ADDRESS,)),
    "copy_centroids": (*2 * (_ADDRESS,), _COUNT),
    "nearest_centroids": (*2 * (_ADDRESS,), *2 * (_COUNT,), *2 * (_ADDRESS,)),
    "nearest_points": (_ADDRESS, *4 * (_COUNT,), _ADDRESS, *2 * (_COUNT,), *4 * (_ADDRESS,)),
    "cluster_step": (*3 * (_ADDRESS,), *3 * (_COUNT,), *3 * (_ADDRESS,)),
    "split_cluster": (*3 * (_ADDRESS,), *5 * (_COUNT,), *3 * (_ADDRESS,)),
    "cluster_counts": (_ADDRESS, *3 * (_COUNT,), _ADDRESS, *2 * (_COUNT,), _ADDRESS),
    "cluster_tokens": (
        _ADDRESS, *3 * (_COUNT,), _ADDRESS, *2 * (_COUNT,), *2 * (_ADDRESS,), *2 * (_COUNT,),
        *3 * (_ADDRESS,),
    ),
    "put_key_codes": (*3 * (_ADDRESS,), *3 * (_COUNT,), _ADDRESS),
    "score_key_codes": (*3 * (_ADDRESS,), _COUNT, _ADDRESS, _COUNT),
    "key_logits": (*3 * (_ADDRESS,), _COUNT, *2 * (_ADDRESS,), _COUNT),
    "pool_logits": (*3 * (_ADDRESS,), *6 * (_COUNT,), _FACTOR, *2 * (_ADDRESS,), _COUNT),
    "logit_sums": (_ADDRESS, *3 * (_COUNT,), _ADDRESS, _ADDRESS, _COUNT),
    "decode_attention": (*6 * (_ADDRESS,), *7 * (_COUNT,), _FACTOR, _COUNT),
    "code_units": (_ADDRESS, *2 * (_COUNT,), *2 * (_ADDRESS,), *4 * (_COUNT,)),
    "prompt_attention": (*9 * (_ADDRESS,), _FACTOR),
    "bfloat16_units": (_ADDRESS,),
    "tree_attention": (*14 * (_ADDRESS,), *2 * (_COUNT,), _FACTOR),
})  # fmt: skip

LEVELS = ("off", "plain", "avx512", "auto")
"""What a process can be limited to: torch alone; C without AVX-512; all but AVX-512 VNNI; all."""
_LEVEL_NAMES = f"{', '.join(LEVELS[:-1])} or {LEVELS[-1]}"

_NEEDS: Mapping[str, int] = MappingProxyType({
    **dict.fromkeys((
        "rms_norm", "turn_query", "low_rank", "int8_linear", "decode_attention", "pool_logits",
        "tree_attention", "predict_query", "prompt_attention", "unpack_int4",
        "int8_groups", "code_units",
    ), LEVELS.index("avx512")),
    **dict.fromkeys((
        "group_scores", "copy_centroids", "nearest_centroids", "nearest_points", "cluster_step",
        "split_cluster", "select_groups", "fetch_groups", "turned_scores", "turned_logits",
        "bfloat16_units", "int4_groups",
    ), LEVELS.index("auto")),
})  # fmt: skip
"""Level of kernels that are written for certain vectors; elsewhere torch is as good as plain C."""

Kernel = Callable[..., None]


def address(array: "NDArray[Any]") -> int:
    """Of an array's first byte (several times cheaper than `array.ctypes.data`)."""
    found: int = array.__array_interface__["data"][0]
    return found


def file_name() -> str:
    """Name of the library's file on this system."""
    return {"win32": "kernels.dll", "darwin": "kernels.dylib"}.get(sys.platform, "kernels.so")


def source_digest(folder: Path = _FOLDER) -> str:
    """Digest of the C sources; the library carries that of the sources it was made from."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.h"), *folder.glob("*.c")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def kernel(name: str) -> Kernel | None:
    """One compiled kernel, taking addresses and numbers; None: its torch twin is to be used.

    So it is where there is no library, the machine lacks the vectors, or `limit` forbids it.
    """
    library = _load(_FOLDER / file_name())
    if library is None:
        return None
    library.penstock_level.restype = ctypes.c_int64
    if library.penstock_level() < _NEEDS.get(name, LEVELS.index("plain")):
        return None
    found = library[f"penstock_{name}"]
    found.argtypes, found.restype = list(_SIGNATURES[name]), None
    return found


def limit(level: str) -> None:
    """Use no more of the compiled kernels than a level in this process, from its beginning on.

    Objects that were made under another level keep what they were made with.

    Args:
        level: one of `LEVELS`.

    Raises:
        ValueError: an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"the compiled kernels have no level {level!r}; give {_LEVEL_NAMES}")
    library = _load(_FOLDER / file_name())
    if library is not None:
        _limit_of(library).value = LEVELS.index(level)
    kernel.cache_clear()


def limited_to() -> str:
    """The level that this process is limited to; "auto" where there is nothing to limit."""
    library = _load(_FOLDER / file_name())
    return "auto" if library is None else LEVELS[_limit_of(library).value]


def _limit_of(library: "ctypes.CDLL") -> ctypes.c_int64:
    """The number that the C code looks at, so that both sides have one."""
    return ctypes.c_int64.in_dll(library, "penstock_limit")


@functools.cache
def _load(path: Path) -> "ctypes.CDLL | None":
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
        carried = ctypes.c_char_p.in_dll(library, "penstock_source_digest").value
    except (OSError, ValueError, TypeError) as error:
        warnings.warn(f"the compiled kernels cannot be used: {error}", stacklevel=2)
        return None
    if carried is None or carried.decode() != source_digest():
        warnings.warn(
            "the compiled kernels are older than their sources and are not used; install again, "
            "or run `python hatch_build.py`",
            stacklevel=2,
        )
        return None
    return library
