"""Options that every benchmark has, read behind its own."""

import argparse
from collections.abc import Sequence

from penstock.core.errors import ConfigError
from penstock.evaluate.result import result_file


def read_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str], *, seed: bool = True,
    resume: bool = True, minutes: bool = True, out: str = "the result, saved as it grows",
) -> argparse.Namespace:  # fmt: skip
    """Add `--out` and `--json` to a program's own options, and read the command line.

    Args:
        parser: has the program's own options.
        seed, resume, minutes: whether the program has `--seed`, `--resume`, `--minutes`.
        out: what `--out` is.

    Raises:
        ConfigError: --resume without --out.
    """
    add = parser.add_argument
    if minutes:
        add("--minutes", type=float, help="begin nothing new when this much time has passed")
    if seed:
        add("--seed", type=int, default=0)
    add("--out", type=result_file, metavar="FILE", help=out)
    if resume:
        add("--resume", action="store_true", help="go on with the result in --out")
    add("--json", action="store_true", help="print the result as the last line")
    args = parser.parse_args(arguments)
    if resume and args.resume and not args.out:
        raise ConfigError("--resume goes on with the file of --out; name it")
    return args
