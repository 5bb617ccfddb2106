"""The system calls of Linux native AIO, by number: no library and no compiler is needed."""

import ctypes
import functools
import platform
import sys
from collections.abc import Callable
from typing import NamedTuple

from penstock.core.errors import StorageError

_CALL_NUMBERS = {  # io_setup, io_destroy, io_submit, io_getevents
    "x86_64": (206, 207, 209, 208),
    "aarch64": (0, 1, 2, 4),
}


class AioCalls(NamedTuple):
    """The four system calls; each returns -1 and sets errno when it fails."""

    setup: Callable[[int, int], int]
    """(max_in_flight, address of the context)"""
    destroy: Callable[[int], int]
    """(context); returns when every read of the context has ended"""
    submit: Callable[[int, int, int], int]
    """(context, count, address of pointers to iocbs); returns how many were taken"""
    get_events: Callable[[int, int, int, int, int], int]
    """(context, at least, at most, address of events, address of timeout); returns how many"""


def find_calls() -> AioCalls:
    """The calls of this machine.

    Raises:
        StorageError: there are none.
    """
    numbers = _CALL_NUMBERS.get(platform.machine())
    if not sys.platform.startswith("linux") or sys.byteorder != "little" or numbers is None:
        raise StorageError("native asynchronous I/O needs Linux on x86-64 or ARM64")
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        raise StorageError("native asynchronous I/O needs a 64-bit Python")
    libc = ctypes.CDLL(None, use_errno=True)
    calls = []
    for number, num_arguments in zip(numbers, (2, 1, 3, 5), strict=True):
        call = libc["syscall"]  # a new function object at every look-up
        call.restype = ctypes.c_long
        call.argtypes = [ctypes.c_long] * (1 + num_arguments)
        calls.append(functools.partial(call, number))
    return AioCalls(*calls)
