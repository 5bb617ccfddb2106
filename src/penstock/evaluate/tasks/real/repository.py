"""Questions on a repository's files: a function's definition, all functions of a file."""

import ast
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.english.needles import insert_at
from penstock.evaluate.tasks.english.prompt_fit import Draft
from penstock.evaluate.tasks.real.texts import HEAD, SourceFile

_SHARE = 1.5
"""Most characters of a file that is asked about, for each token of the prompt: it fills at most
about half of it."""
_LINES = (6, 30)
"""Of a function that is asked for."""
_LISTED_FILES = 8
"""Of the files that fit, so many with the most functions may be listed."""
_PART = 4
"""Characters of a filler unit."""
_MOST_LISTED = 30
_Fitting = TypeVar("_Fitting")


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method that a file defines."""

    name: str
    parameters: tuple[str, ...]
    source: str
    """Its lines, as they are indented."""
    is_method: bool

    @property
    def signature(self) -> str:
        """As an answer has it."""
        return f"{self.name}({', '.join(self.parameters)})"


class Repository:
    """Files, the functions of each, and prompts that show many of them.

    Args:
        files: of Python source.
    """

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._functions = {file: functions_of(file) for file in files}
        names = Counter(one.name for found in self._functions.values() for one in found)
        self._askable = [
            (file, one)
            for file, found in self._functions.items()
            for one in found
            if names[one.name] == 1
            and not one.is_method
            and _LINES[0] <= len(one.source.splitlines()) <= _LINES[1]
        ]
        listable = [
            file
            for file, found in self._functions.items()
            if len({one.name for one in found}) == len(found) <= _MOST_LISTED
        ]
        self._listable = sorted(listable, key=lambda file: -len(self._functions[file]))

    def question(self, rng: random.Random, tokens: int) -> Draft:
        """A function is named; its file and its definition are asked for.

        Source: ours, after RepoQA (Liu et al., arXiv 2406.06025), which asks for a function by what
        it does. Files stand in random order; the score is `fenced_code` against the definition.

        Raises:
            ConfigError: no file is small enough for so few tokens.
        """
        pairs = [pair for pair in self._askable if len(pair[0].text) <= _SHARE * tokens]
        file, one = rng.choice(_some(pairs, tokens))
        return Draft(
            task="repository",
            preface="Below are files of a repository of Python code, each below its path.\n",
            pieces=self._showing(file, rng),
            question=f"\nQuestion: In which file is the function {one.name} defined, and what is "
            "its complete definition? Give the path of the file in a comment, and below it the "
            "function with its docstring, exactly as it stands above.",
            lead=f"```python\n{HEAD.rstrip()}",
            answer=f" {file.path}\n{one.source}\n```",
            values=(one.name,),
            metric="fenced_code",
            new_tokens=0,
        )

    def listing(self, rng: random.Random, tokens: int) -> Draft:
        """All functions and methods of one file among others, in their order, with parameters.

        Source: ours. The first one is given, so that small models keep to the form; the score is
        the share of the others' facts kept, each of their parameters.

        Raises:
            ConfigError: no file is small enough for so few tokens.
        """
        fitting = [file for file in self._listable if len(file.text) <= _SHARE * tokens]
        file = rng.choice(_some(fitting[:_LISTED_FILES], tokens))
        found = self._functions[file]
        given, *lines = [f"{number}. {one.signature}" for number, one in enumerate(found, 1)]
        opening = "2."
        return Draft(
            task="long_answer",
            preface="Below are files of a repository of Python code, each below its path.\n",
            pieces=self._showing(file, rng),
            question=f"\nQuestion: List all {len(found)} functions and methods that the file "
            f"{file.path} defines, in their order, one a line, numbered, each with the names of "
            "its parameters (without types and defaults).",
            lead=f"Answer:\n{given}\n{opening}",
            answer="\n".join(lines).removeprefix(opening),
            values=tuple("\t".join([one.name, *one.parameters]) for one in found[1:]),
            metric="facts",
            new_tokens=0,
        )

    def _showing(self, asked: SourceFile, rng: random.Random) -> Callable[[int], Sequence[str]]:
        """`Draft.pieces`: so many times `_PART` characters of other files, with this among them.

        The files stand in random order; the last of the others ends where the characters do.
        """
        place = rng.random()
        others = [file for file in self._functions if file != asked]
        texts = [f"\n\n{file.shown}" for file in rng.sample(others, len(others))]

        def pieces(units: int) -> Sequence[str]:
            kept, left = [], units * _PART
            for text in texts:
                if left <= 0:
                    break
                kept.append(text[:left].rstrip())
                left -= len(text)
            return insert_at([place], [f"\n\n{asked.shown}"], [text for text in kept if text])

        return pieces


def _some(fitting: list[_Fitting], tokens: int) -> list[_Fitting]:
    if not fitting:
        raise ConfigError(f"tokens={tokens} is too short for this task: no file is that small")
    return fitting


def functions_of(file: SourceFile) -> list[Function]:
    """Functions and methods of a file in its order; none inside of functions, no `__name__`."""
    found, lines = [], file.text.splitlines()
    blocks: list[tuple[ast.stmt, bool]] = [(node, False) for node in ast.parse(file.text).body]
    while blocks:
        node, is_method = blocks.pop(0)
        if isinstance(node, ast.ClassDef):
            blocks = [*((inner, True) for inner in node.body), *blocks]
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            names = tuple(one.arg for one in every)
            found.append(Function(node.name, names, source, is_method))
    return found
