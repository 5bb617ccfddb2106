"""Python processes of our own, which run no file out of the folder that they are started in."""

import os
import sys
from pathlib import Path

_RUN = (
    "import sys; n = int(sys.argv[1]); sys.path[:] = sys.argv[2 : 2 + n]; del sys.argv[1 : 2 + n]; "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
)
"""Imports what is built in alone until the path is set."""
_ROOT = Path(__file__).resolve().parents[2]
"""The folder that the package was imported from."""


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as a program in a new Python.

    The new process imports from where this one does. The current folder is left out, unless the
    package itself was imported from there: it may be a folder of data, with files called as
    modules are.
    """
    path = import_path()
    return [sys.executable, "-P", "-c", _RUN, str(len(path)), *path, module, *arguments]


def import_path() -> list[str]:
    """This process's import path without the current folder, under whichever name."""
    here = Path(os.path.realpath(os.curdir))
    return [
        entry for entry in map(str, sys.path)
        if here == _ROOT or os.path.realpath(entry or os.curdir) != str(here)
    ]  # fmt: skip
