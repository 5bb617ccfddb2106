"""DocumentSettings: how a document is read; what of its policy and model its bytes depend on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from penstock.core.errors import ConfigError
from penstock.core.shape import KVShape
from penstock.engine.adapter import LowRankAdapter
from penstock.engine.stored_past import SECTOR_BYTES
from penstock.methods import SelectionPolicy
from penstock.methods.search_space import fields_of
from penstock.models.bundled_adapter import NO_ADAPTER, adapters_at_hand
from penstock.models.cache_settings import find_basis
from penstock.models.identity import ModelIdentity
from penstock.models.loader import CausalLM, LoadedModel, load
from penstock.models.model_shape import inspect_model
from penstock.storage.file import KVFile
from penstock.storage.store import Sealing

Memory: TypeAlias = int | float | str | None
STORED = "stored"
"""As `memory`: the budget that the document was added with."""


def _unchanged(file: KVFile) -> KVFile:
    return file


@dataclass(frozen=True, kw_only=True)
class DocumentSettings:
    """How a document is written and read; nothing of it is stored.

    Attributes:
        key: 32 bytes, of an encrypted document
        memory: budget of each cache: as for `TieredCache`, or "stored"
        store: where caches keep what is new: "auto", a folder, "memory"
        adapter: a low-rank adapter's file; None: one at hand, for a stored document the one that it
            was stored with; "none": none
        prefill_chunk_size: tokens per forward pass; a single one would be a decode step, so that
            with 1 it is two
        wrap: applied to the file of each layer: a simulated device
    """

    key: bytes | None = None
    memory: Memory = STORED
    store: str | Path = "auto"
    adapter: str | Path | LowRankAdapter | None = None
    prefill_chunk_size: int = 1024
    wrap: Callable[[KVFile], KVFile] = _unchanged

    def __post_init__(self) -> None:
        if self.prefill_chunk_size < 1:
            raise ConfigError(f"prefill_chunk_size={self.prefill_chunk_size} must be at least 1")

    @property
    def sealed(self) -> Sealing:
        """Whether caches of the document encrypt what they keep beside it."""
        return True if self.key is not None else "auto"


@dataclass(frozen=True)
class Reader:
    """A model that reads documents, and how."""

    loaded: LoadedModel
    settings: DocumentSettings

    @cached_property
    def _model(self) -> ModelIdentity:
        return ModelIdentity.of(self.loaded.model, self.loaded.tokenizer)

    def identity(self, policy: SelectionPolicy, group_tokens: int) -> dict[str, str]:
        """Identity of what this model stores under a policy.

        Raises:
            AdapterError: the adapter was made for another model, or cannot be read.
        """
        model = self.loaded.model
        basis = find_basis(
            model, inspect_model(model), policy, self.settings.adapter, [], exact=False,
            known=self.loaded.known.look(model),
        )  # fmt: skip
        return self._model.stored(basis, group_tokens=group_tokens)

    def as_stored(
        self, identity: Mapping[str, str], policy: SelectionPolicy, group_tokens: int
    ) -> "Reader":
        """This reader; where no adapter was given, with the one at hand that stored KV has.

        A model that was calibrated since reads what it stored before.

        Args:
            identity: of what is stored, see `ModelIdentity.stored`.
        """
        if self.settings.adapter is not None or not policy.uses_adapter:
            return self
        model = self.loaded.model
        known = self.loaded.known.look(model)
        at_hand = adapters_at_hand(known.fingerprint(), model.name_or_path, known.adapter)
        for adapter in (*at_hand, None):
            made = self._model.stored(adapter, group_tokens=group_tokens)
            if made["adapter"] == identity.get("adapter"):
                settings = replace(self.settings, adapter=adapter or NO_ADAPTER)
                same = Reader(self.loaded, settings)
                vars(same)["_model"] = self._model  # every byte of the weights was read for it
                return same
        return self


def as_loaded(model: str | Path | LoadedModel | CausalLM) -> LoadedModel:
    """A loaded model, whatever was given.

    Raises:
        ModelLoadError: it cannot be loaded.
    """
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, str | Path):
        return load(model)
    return LoadedModel(model=model, tokenizer=None, name=model.name_or_path or type(model).__name__)


def unit_tokens(policy: SelectionPolicy, shape: KVShape) -> int:
    """Tokens of a stored unit: the policy's group where caches read it in place; else what fills
    a sector, so that no room is lost."""
    own = policy.unit_tokens
    if policy.shares_units and not policy.per_head and not policy.stays_resident:
        return own
    return own * -(-SECTOR_BYTES // (own * shape.token_bytes))


def stored_fields(policy: SelectionPolicy, planned: SelectionPolicy) -> dict[str, Any]:
    """Fields of a policy for later caches: as the user chose them, the index's as they came out.

    Args:
        planned: the policy with every open choice made.
    """
    pinned = {name: getattr(planned, name) for name in policy.index_fields}
    return fields_of(replace(policy, **pinned))
