"""run_program(): a benchmark from the command line, its errors told in one line.

A program has `parse_arguments`, which raises ConfigError where the command line makes no sense, and
`run`, which raises any PenstockError. They do not say so one by one.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from penstock.core.errors import PenstockError
from penstock.core.printable import printable


def run_program(run: Callable[[Sequence[str]], Any]) -> None:
    """Call `run` with the command line's arguments.

    Bad input and Ctrl-C end the process with one line on stderr and status 1.
    """
    try:
        run(sys.argv[1:])
    except PenstockError as error:
        sys.exit(f"error: {printable(str(error))}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
