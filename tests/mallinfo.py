"""Malloc: what glibc says of its own memory."""

import ctypes


class Malloc(ctypes.Structure):
    """What glibc's `mallinfo2` says."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost",
    )]  # fmt: skip
