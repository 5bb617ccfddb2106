"""Backend: what the routes of one server share."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.generation.serving.engine import Engine
from penstock.models.loader import LoadedModel, Tokenizer
from penstock.server.answer_format import AnswerFormat
from penstock.server.errors import ApiError
from penstock.server.grammar import Grammars
from penstock.server.meters import Meters
from penstock.server.settings import ServerSettings

if TYPE_CHECKING:
    from penstock.server.shelf import Shelf


@dataclass
class Backend:
    """An engine and what stands around it."""

    engine: Engine
    settings: ServerSettings
    meters: Meters
    shelf: "Shelf | None" = None
    """Stored documents; None: the server has none."""
    is_closing: bool = False
    """No new requests are taken."""
    names: dict[str, str] = field(default_factory=dict)
    """What messages call the model and its folder instead."""

    @property
    def error(self) -> BaseException | None:
        """Why the engine failed, if it did."""
        return self.engine.error

    @property
    def loaded(self) -> LoadedModel:
        """The model."""
        return self.engine.llm.loaded

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's.

        Raises:
            ApiError: it came without one.
        """
        if self.loaded.tokenizer is None:
            raise ApiError(501, "the model came without a tokenizer; give token ids")
        return self.loaded.tokenizer

    @cached_property
    def format(self) -> AnswerFormat:
        """How the model writes thoughts and calls of tools."""
        return AnswerFormat.of(self.loaded)

    @cached_property
    def grammars(self) -> Grammars:
        """What holds answers to a form."""
        return Grammars(self.loaded)

    def check_model(self, name: str | None) -> None:
        """Refuse another model than the one that is served.

        Raises:
            ApiError: with the name of the one that is.
        """
        if name and name != self.settings.model_name:
            raise ApiError(
                404, f"there is no model {name!r} here, only {self.settings.model_name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip
