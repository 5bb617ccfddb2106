"""TunedConfig: what `penstock tune` found, as one JSON file that a run takes its settings from."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from penstock.core.errors import ConfigError
from penstock.engine.policy import SelectionPolicy
from penstock.methods.config_file import FORMAT, checked, read_document, write_config
from penstock.methods.search_space import policy_from

AUTO = "auto"
"""The policy that stands for the config's own pick."""
_PLACES = ("memory", "host")
_IN_MEMORY = ("folder",)
"""Fields that are not in the file."""


class Figures(TypedDict):
    """What a solution does, predicted or measured; all sequences of its batch together."""

    tokens_per_s: float
    """New tokens per second."""
    first_token_s: float
    """Seconds from the prompt to the first token."""
    resident_bytes: int
    """Fast memory that the cache holds."""
    read_bytes_per_token: float
    kl: float | None
    """Mean KL divergence from full attention, in nats; None where it was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """The setting of one policy for one batch size and context length."""

    batch: int
    context: int
    """Most tokens of a sequence, prompt and answer."""
    policy: str
    """A name of `POLICIES`."""
    fields: dict[str, Any]
    """Of the policy, where they differ from its defaults."""
    limit_bytes: int
    """Budget for this batch."""
    predicted: Figures
    measured: Figures | None
    reason: str
    """Why this one, in a sentence."""
    is_pick: bool
    """Whether it is the best of all policies for its batch and context."""

    def make_policy(self) -> SelectionPolicy:
        """The policy with this setting.

        Raises:
            ConfigError: this version has no such policy or field.
        """
        return policy_from(self.policy, self.fields)

    def describe(self) -> str:
        """The policy, its fields and what it was tuned for, in one line."""
        chosen = ", ".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.policy} ({chosen or 'defaults'}) tuned for {self.batch} x {self.context}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedConfig:
    """The solutions of one tuning run for one model, one disk and one memory budget.

    Source: KVSwap (arXiv 2511.11907), appendix A.4, "Record solutions".
    """

    model: str
    """What the model was called."""
    fingerprint: str
    """Of the model (`models.fingerprint`)."""
    disk: str
    """Where the KV cache lay: a simulated device, "memory", "host", or "real" for the machine's."""
    simulated: bool
    """Whether the times of `disk` were simulated."""
    max_context: int
    """Most tokens of a sequence, prompt and answer."""
    max_batch: int
    limit_bytes: int
    """Memory budget for `max_batch` sequences."""
    floor: float
    """Largest mean KL divergence from full attention that was allowed, in nats."""
    adapter: str | None
    """Name of a low-rank adapter's file in the config's folder."""
    explanation: str
    """A paragraph for people."""
    versions: dict[str, str]
    """Of penstock, torch and transformers."""
    solutions: tuple[Solution, ...]
    front: tuple[dict[str, Any], ...] = ()
    """Pareto front over the policies, as plain data."""
    folder: Path = field(default=Path(), compare=False, repr=False)
    """Where the file is; not part of it."""

    # What a run asks --------------------------------------------------------------------------

    def solution(self, batch: int, tokens: int, policy: str | None = None) -> Solution:
        """The solution for a batch: the exact match, or the nearest (appendix A.4).

        Nearest is, among solutions for batches at least as large (or any, where there is none), the
        one of the shortest context that holds the tokens, and then of the nearest batch.

        Args:
            batch: sequences.
            tokens: of the longest sequence, prompt, padding and answer.
            policy: a policy whose own solution is wanted; None or "auto" for the pick.

        Raises:
            ConfigError: the batch or the tokens are more than what was tuned for, or there is no
                solution of that policy.
        """
        self._require_batch(batch)
        if tokens > self.max_context:
            raise ConfigError(
                f"the config was tuned for up to {self.max_context} tokens, prompt and answer, and "
                f"these are {tokens}; {self._again} for {tokens} tokens, or shorten them"
            )
        if policy is None or policy == AUTO:
            known = [each for each in self.solutions if each.is_pick]
        else:
            known = [each for each in self.solutions if each.policy == policy]
        if not known:
            names = ", ".join(dict.fromkeys(each.policy for each in self.solutions))
            raise ConfigError(
                f"the config has no solution of {policy or AUTO}, only of {names}; "
                f"{self._again} with that policy"
            )
        long_enough = [each for each in known if each.context >= tokens]
        if not long_enough:
            longest = max(each.context for each in known)
            raise ConfigError(
                f"the config has solutions of {policy or AUTO} for up to {longest} tokens, prompt "
                f"and answer, and these are {tokens}; take policy {AUTO}, or shorten them"
            )

        def distance(each: Solution) -> tuple[bool, int, int]:
            return each.batch < batch, each.context, abs(each.batch - batch)

        return min(long_enough, key=distance)

    def limit_for(self, batch: int) -> int:
        """Budget of a batch, in bytes: the same for every sequence (appendix A.4).

        Raises:
            ConfigError: the batch is larger than what was tuned for.
        """
        self._require_batch(batch)
        return self.limit_bytes * batch // self.max_batch

    def check(self, fingerprint: str, name: str = "this model") -> None:
        """Refuse a config of another model.

        Args:
            fingerprint: of the model that is to run.
            name: what it is called.

        Raises:
            ConfigError: it was tuned for a model with other weights or shapes.
        """
        if fingerprint != self.fingerprint:
            raise ConfigError(
                f"the config was tuned for another model: {self.model} (fingerprint "
                f"{self.fingerprint[:12]}), not {name} ({fingerprint[:12]}); run penstock tune "
                f"{name if name != 'this model' else 'for it'}"
            )

    @property
    def store(self) -> str:
        """The disk that it was tuned for, as `store=` takes it."""
        return self.disk if self.simulated or self.disk in _PLACES else "auto"

    @property
    def adapter_path(self) -> Path | None:
        """Where the adapter is, if there is one."""
        return None if self.adapter is None else self.folder / self.adapter

    def _require_batch(self, batch: int) -> None:
        if batch > self.max_batch:
            raise ConfigError(
                f"the config was tuned for up to {self.max_batch} sequences, and these are "
                f"{batch}; {self._again} for a batch of {batch}, or give fewer at a time"
            )

    @property
    def _again(self) -> str:
        return f"run penstock tune {self.model} again"

    # The file ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            StorageError: it cannot be written.
        """
        content = dataclasses.asdict(self)
        for name in _IN_MEMORY:
            del content[name]
        text = json.dumps({"format": FORMAT, **content}, indent=1, allow_nan=False) + "\n"
        write_config(text, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "TunedConfig":
        """Read a file that `save` wrote.

        Raises:
            ConfigError: it is missing, is no config, is of another format, lacks something, or has
                a policy or a field that this version does not know.
        """
        content = read_document(Path(path))
        own = checked(cls, content, str(path), besides=_IN_MEMORY)
        own["solutions"] = tuple(
            Solution(**checked(Solution, each, f"{path}: solution {number}"))
            for number, each in enumerate(own["solutions"], start=1)
        )
        config = cls(
            **{**own, "front": tuple(own["front"])}, folder=Path(path).absolute().parent
        )  # fmt: skip
        config._check_content(str(path))
        return config

    def _check_content(self, path: str) -> None:
        if not any(each.is_pick for each in self.solutions):
            raise ConfigError(f"{path} has no solution that is a pick; {self._again}")
        sizes = (self.max_context, self.max_batch, self.limit_bytes, *(
            size for each in self.solutions for size in (each.batch, each.context)
        ))  # fmt: skip
        if min(sizes) < 1:
            raise ConfigError(f"{path} has a size below 1; {self._again}")
        if self.adapter is not None and self.adapter != (Path(self.adapter).name or None):
            raise ConfigError(f"{path}: adapter={self.adapter!r} is no name of a file beside it")
        for number, each in enumerate(self.solutions, start=1):
            try:
                each.make_policy()
            except ConfigError as error:
                raise ConfigError(f"{path}: solution {number}: {error}") from error
