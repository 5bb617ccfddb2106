"""Options that every benchmark has, read behind its own."""

import argparse
from collections.abc import Mapping, Sequence

from penstock.core.errors import ConfigError
from penstock.core.renamed_options import under_new_names
from penstock.evaluate.result import result_file


def read_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str], *, seed: bool = True,
    resume: bool = True, minutes: bool = True, out: str = "the result, saved as it grows",
    renamed: Mapping[str, str] | None = None, renamed_with_out: Mapping[str, str] | None = None,
) -> argparse.Namespace:  # fmt: skip
    """Add `--output` and `--json` to a program's own options, and read the command line.

    Args:
        parser: has the program's own options.
        seed, resume, minutes: whether the program has `--seed`, `--resume`, `--minutes`.
        out: what `--output` is.
        renamed: former names of the program's own options, and their present ones.
        renamed_with_out: the same, of command lines with the former `--out` alone.

    Raises:
        ConfigError: --resume without --output.
    """
    add = parser.add_argument
    if minutes:
        add("--minutes", type=float, help="begin nothing new when this much time has passed")
    if seed:
        add("--seed", type=int, default=0)
    add("-o", "--output", dest="out", type=result_file, metavar="FILE", help=out)
    if resume:
        add("--resume", action="store_true", help="go on with the result in --output")
    add("--json", action="store_true", help="print the result as the last line")
    names = {"--out": "--output", **(renamed or {})}
    if any(word.partition("=")[0] == "--out" for word in arguments):
        names |= renamed_with_out or {}
    args = parser.parse_args(list(under_new_names(arguments, names)))
    if resume and args.resume and not args.out:
        raise ConfigError("--resume goes on with the file of --output; name it")
    return args
