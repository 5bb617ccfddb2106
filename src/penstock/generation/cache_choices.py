"""What a run's cache is made of: the caller's settings, and a tuned config's for the rest."""

from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import AdapterError, ConfigError
from penstock.engine.adapter import LowRankAdapter
from penstock.engine.policy import SelectionPolicy
from penstock.methods.tuned_config import AUTO, TunedConfig

DEFAULT_POLICY = "kvswap"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchChoices:
    """What one batch's `TieredCache` is given."""

    policy: str | SelectionPolicy
    memory: int | float | str | None
    store: str | Path
    adapter: str | Path | LowRankAdapter | None
    notices: tuple[str, ...] = ()
    """What a user should know of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheChoices:
    """What the caller of `LLM` wants of its cache; what is left open is the config's, if any."""

    policy: str | SelectionPolicy | None
    memory: int | float | str | None
    store: str | Path
    adapter: str | Path | LowRankAdapter | None
    config: TunedConfig | None

    @classmethod
    def of(
        cls, *, policy: str | SelectionPolicy | None, memory: int | float | str | None,
        store: str | Path, adapter: str | Path | LowRankAdapter | None,
        config: TunedConfig | str | Path | None,
    ) -> "CacheChoices":  # fmt: skip
        """Read the config and look for its adapter.

        Raises:
            ConfigError: the config cannot be read, or policy "auto" has none.
            AdapterError: the config's adapter is not there, and no other was given.
        """
        if isinstance(config, str | Path):
            config = TunedConfig.load(config)
        if config is None and policy == AUTO:
            raise ConfigError(
                "policy auto needs a tuned config: run penstock tune MODEL ... -o config.json and "
                "give --config"
            )
        if config is not None and adapter is None:
            adapter = config.adapter_path
            if adapter is not None and not adapter.is_file():
                raise AdapterError(
                    f"the config's adapter {adapter} is not there; put it beside the config, or "
                    "run penstock tune again"
                )
        return cls(policy=policy, memory=memory, store=store, adapter=adapter, config=config)

    def for_batch(self, batch: int, tokens: int) -> BatchChoices:
        """The settings for a batch.

        Args:
            batch: sequences.
            tokens: of the longest sequence, prompt, padding and answer.

        Raises:
            ConfigError: the config has nothing for such a batch.
        """
        config, policy = self.config, self.policy
        if config is None:
            return BatchChoices(
                policy=DEFAULT_POLICY if policy is None else policy, memory=self.memory,
                store=self.store, adapter=self.adapter,
            )  # fmt: skip
        notices: tuple[str, ...] = ()
        if not isinstance(policy, SelectionPolicy):
            solution = config.solution(batch, tokens, policy)
            policy = solution.make_policy()
            notices = (f"config: {solution.describe()} tokens, disk {config.disk}",)
        memory = self.memory
        if isinstance(memory, str) and memory.strip().lower() == "auto":
            memory = config.limit_for(batch)
        return BatchChoices(
            policy=policy, memory=memory, adapter=self.adapter, notices=notices,
            store=config.store if str(self.store) == "auto" else self.store,
        )  # fmt: skip
