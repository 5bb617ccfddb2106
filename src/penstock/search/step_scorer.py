"""StepScorer: what rates the candidates of a search: log-probability, a callable, a model."""

import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import torch

from penstock.core.errors import ConfigError, PenstockError, VerifierError

LOGPROB = "logprob"
REWARD = "reward"
_FILE_ENDING = ".py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One continuation of the prompt, as a scorer sees it: whole, not its newest step alone."""

    prompt: str
    """The prompt's text; empty without a tokenizer."""
    prompt_token_ids: Sequence[int]
    text: str
    """Text behind the prompt; empty without a tokenizer."""
    token_ids: Sequence[int]
    """Tokens behind the prompt."""
    log_probability: float
    """Sum over `token_ids`, under the model's own distribution (temperature 1, unfiltered)."""
    is_finished: bool
    """Whether an end token, a stop text or the last allowed token has come."""

    @property
    def num_tokens(self) -> int:
        """Tokens behind the prompt."""
        return len(self.token_ids)


class StepScorer(Protocol):
    """Rates candidates; a higher score is better, and minus infinity means "never keep".

    Attributes:
        name: what errors, tables and figures call it.
    """

    name: str

    def score(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """One number per candidate, in their order."""


class LogProbabilityScorer:
    """Sum of log-probabilities over tokens to the power `length_penalty`, as transformers do it.

    Args:
        length_penalty: 1 is the mean per token, 0 the sum; more favours long continuations.
    """

    def __init__(self, length_penalty: float = 1.0) -> None:
        self.name = LOGPROB
        if length_penalty != 1:
            self.name += f" with length penalty {length_penalty:g}"
        if not math.isfinite(length_penalty):
            raise ConfigError(f"length_penalty={length_penalty} must be a finite number")
        self._length_penalty = length_penalty

    def score(self, candidates: Sequence[Candidate]) -> list[float]:
        """Log probability by the length to a power. [candidates]"""
        return [one.log_probability / one.num_tokens**self._length_penalty for one in candidates]


class CallableScorer:
    """Any function over texts: `function(texts)`, or `function(prompt, texts)` if it takes two.

    `texts` is the list of all candidates' texts behind the prompt; the result is one number for
    each. A verifier that has to look something up in the prompt takes both.
    """

    needs_text = True

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        if not callable(function):
            raise ConfigError(f"{function!r} is not callable; a scorer is a function over texts")
        self._function = function
        self._wants_prompt = _takes_two(function)
        self.name = name or str(getattr(function, "__name__", type(function).__name__))

    def score(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """What the function returns, unchecked."""
        texts = [one.text for one in candidates]
        returned: Sequence[float] = (
            self._function(candidates[0].prompt, texts)
            if self._wants_prompt
            else self._function(texts)
        )
        return returned


def needs_text(scorer: StepScorer) -> bool:
    """Whether a scorer can do nothing without a tokenizer; of an unknown one it is not known."""
    return bool(getattr(scorer, "needs_text", False))


def as_scorer(scorer: StepScorer | Callable[..., Any] | str) -> StepScorer:
    """A scorer from whatever a caller named it by.

    Raises:
        ConfigError: it is neither a scorer, a function nor a name that `load_scorer` takes.
        ModelLoadError: the reward model cannot be loaded.
    """
    if isinstance(scorer, str):
        return load_scorer(scorer)
    if callable(getattr(scorer, "score", None)):
        return _named(scorer, type(scorer).__name__)
    return CallableScorer(cast(Callable[..., Any], scorer))


def load_scorer(
    name: str, *, length_penalty: float = 1.0, device: torch.device | str = "cpu"
) -> StepScorer:
    """The scorer of a name.

    Args:
        name: "logprob", "module:function" (a function over texts, or an object with a `score`
            method), "FILE.py:function", or "reward:FOLDER" (a reward model that `save_pretrained`
            wrote).
        length_penalty: of "logprob" only.
        device: of a reward model.

    Raises:
        ConfigError: no such module or function, or it cannot be called.
        ModelLoadError: the reward model cannot be loaded.
    """
    if name == LOGPROB:
        return LogProbabilityScorer(length_penalty)
    kind, rest = _parts(name)
    if not (kind and rest):
        raise ConfigError(
            f"there is no scorer {name!r}; write {LOGPROB}, module:function, FILE.py:function or "
            f"{REWARD}:FOLDER"
        )
    if kind == REWARD:
        # Loads transformers, which the other scorers do without.
        from penstock.models.reward_model import RewardModelScorer

        return RewardModelScorer(rest, device=device)
    found = _find(name, kind, rest)
    if not isinstance(found, type) and callable(getattr(found, "score", None)):
        return _named(found, name)
    if not callable(found):
        raise ConfigError(
            f"scorer {name}: {rest} is {type(found).__name__}, which cannot be called; give a "
            "function over texts"
        )
    return CallableScorer(found, name)


def code_folder(name: str) -> Path | None:
    """The folder that a scorer's own code may lie in; None where its name asks for no code."""
    kind, rest = _parts(name)
    if not (kind and rest) or kind == REWARD:
        return None
    return Path(os.path.expanduser(kind)).absolute().parent if _is_file(kind) else Path.cwd()


def _parts(name: str) -> tuple[str, str]:
    """What is in front of the colon and behind it; a file's name may have colons of its own."""
    file, colon, function = name.rpartition(":")
    if colon and _is_file(file):
        return file, function
    kind, _, rest = name.partition(":")
    return kind, rest


def _is_file(kind: str) -> bool:
    return kind.endswith(_FILE_ENDING)


def checked_scores(scorer: StepScorer, candidates: Sequence[Candidate]) -> list[float]:
    """Rate candidates and make sure that every one has a rating.

    Raises:
        VerifierError: the scorer raised, or returned something other than one number, not NaN and
            not plus infinity, for each candidate; names the scorer and what was wrong.
    """
    try:
        returned: Any = scorer.score(candidates)
        values = _listed(returned)  # a generator does its work here
    except PenstockError:
        raise
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise VerifierError(f"scorer {scorer.name} raised {cause}") from error
    if values is None:
        raise VerifierError(
            f"scorer {scorer.name} returned {type(returned).__name__} instead of a list of "
            f"{len(candidates)} numbers"
        )
    if len(values) != len(candidates):
        raise VerifierError(
            f"scorer {scorer.name} returned {len(values)} scores for {len(candidates)} texts; it "
            "has to return one for each"
        )
    return [_checked(scorer, at, value) for at, value in enumerate(values)]


def _listed(returned: Any) -> list[Any] | None:
    """What a scorer returned as a list; None for what is none, such as an array of no dimension."""
    if isinstance(returned, str | bytes) or not isinstance(returned, Iterable):
        return None
    if getattr(returned, "ndim", 1) == 0:
        return None
    return list(returned.detach() if isinstance(returned, torch.Tensor) else returned)


def _checked(scorer: StepScorer, index: int, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if math.isnan(number) or number == math.inf:
        shown = " ".join(repr(value).split())
        shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
        raise VerifierError(
            f"scorer {scorer.name} returned {shown} for text {index}; a score is a number, or "
            "minus infinity to drop the text"
        )
    return number


def _named(scorer: Any, name: str) -> StepScorer:
    """A scorer that errors can name, as it wants or by `name`.

    Raises:
        ConfigError: it has no name and takes none.
    """
    if not hasattr(scorer, "name"):
        try:
            scorer.name = name
        except AttributeError as error:  # frozen, or with slots
            raise ConfigError(
                f"{type(scorer).__name__} has no name and cannot be given one; add `name` to it"
            ) from error
    named: StepScorer = scorer
    return named


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function has two positional parameters that must be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(needed) == 2


def _find(name: str, module_name: str, path: str) -> Any:
    """Import "module" and look up "function" (or "object.method") in it.

    Raises:
        ConfigError: either is not there, or the module fails while it is imported.
    """
    try:
        found: Any = (
            _from_file(Path(os.path.expanduser(module_name))) if _is_file(module_name)
            else importlib.import_module(module_name)
        )  # fmt: skip
    except ModuleNotFoundError as error:
        missing = f"needs {error.name}, which is not installed"
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            missing = "was not found; it has to be installed or lie in the current folder"
        raise ConfigError(f"scorer {name}: module {module_name} {missing}") from error
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"scorer {name}: importing {module_name} raised {cause}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"scorer {name}: module {module_name} has no {path}; for a file that is called as "
                f"an installed module is, write FILE{_FILE_ENDING}:{path}"
            )
        found = getattr(found, part)
    return found


def _from_file(path: Path) -> ModuleType:
    """The module of a file, under a name that is no other module's.

    Raises:
        FileNotFoundError: there is no such file; and whatever the file itself raises.
    """
    name = f"penstock_scorer_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
