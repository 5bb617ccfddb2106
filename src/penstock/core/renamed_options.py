"""Options of command lines that have another name now: their former one still works."""

import sys
from collections.abc import Iterator, Mapping, Sequence


def under_new_names(args: Sequence[str], renamed: Mapping[str, str]) -> Iterator[str]:
    """The words of a command line with options under their present names.

    A line on stderr says what was renamed. Words behind `--` are no options.

    Args:
        renamed: former names of options, and their present ones.
    """
    ended = False
    for arg in args:
        ended = ended or arg == "--"
        name, equals, value = arg.partition("=")
        if ended or name not in renamed:
            yield arg
            continue
        sys.stderr.write(f"note: {name} is called {renamed[name]} now\n")
        yield renamed[name] + equals + value
