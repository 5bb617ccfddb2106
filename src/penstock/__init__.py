"""Long-context language models in a fixed memory budget, with the KV cache on disk.

This is the public API: what a user may import, and nothing else. The names are loaded when they
are first used, so that `import penstock` itself is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.core.errors import (
    AdapterError,
    BudgetError,
    CacheStateError,
    ConfigError,
    DocumentDamagedError,
    DocumentError,
    DocumentMismatchError,
    FetchError,
    ModelLoadError,
    PenstockError,
    PromptError,
    QueueFullError,
    StorageError,
    StoreFullError,
    UnsupportedModelError,
    VerifierError,
)

if TYPE_CHECKING:
    from penstock.documents.conversation import Conversation
    from penstock.documents.document import Document
    from penstock.documents.sessions import Sessions
    from penstock.documents.settings import DocumentSettings
    from penstock.engine.policy import SelectionPolicy
    from penstock.generation.engine import LLM
    from penstock.generation.logprobs import Logprob
    from penstock.generation.output import CompletionOutput, RequestOutput
    from penstock.generation.prompts import TextPrompt, TokensPrompt
    from penstock.generation.sampling import SamplingParams
    from penstock.generation.serving.engine import Engine
    from penstock.generation.serving.request import Request
    from penstock.methods import POLICIES
    from penstock.methods.kvswap.policy import KVSwap
    from penstock.methods.tuned_config import TunedConfig
    from penstock.models.cache_adapter import TieredCache
    from penstock.models.loader import load
    from penstock.search.beam_searcher import BeamSearcher, SearchMemory
    from penstock.search.search_params import SearchParams
    from penstock.search.step_scorer import Candidate, StepScorer
    from penstock.tuner.tune import tune

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "POLICIES",
    "AdapterError",
    "BeamSearcher",
    "BudgetError",
    "CacheStateError",
    "Candidate",
    "CompletionOutput",
    "ConfigError",
    "Conversation",
    "Document",
    "DocumentDamagedError",
    "DocumentError",
    "DocumentMismatchError",
    "DocumentSettings",
    "Engine",
    "FetchError",
    "KVSwap",
    "Logprob",
    "ModelLoadError",
    "PenstockError",
    "PromptError",
    "QueueFullError",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "SearchMemory",
    "SearchParams",
    "SelectionPolicy",
    "Sessions",
    "StepScorer",
    "StorageError",
    "StoreFullError",
    "TextPrompt",
    "TieredCache",
    "TokensPrompt",
    "TunedConfig",
    "UnsupportedModelError",
    "VerifierError",
    "__version__",
    "load",
    "tune",
]

_HOMES = {
    "BeamSearcher": "penstock.search.beam_searcher",
    "Candidate": "penstock.search.step_scorer",
    "CompletionOutput": "penstock.generation.output",
    "Conversation": "penstock.documents.conversation",
    "Document": "penstock.documents.document",
    "DocumentSettings": "penstock.documents.settings",
    "Engine": "penstock.generation.serving.engine",
    "KVSwap": "penstock.methods.kvswap.policy",
    "LLM": "penstock.generation.engine",
    "Logprob": "penstock.generation.logprobs",
    "POLICIES": "penstock.methods",
    "Request": "penstock.generation.serving.request",
    "RequestOutput": "penstock.generation.output",
    "SamplingParams": "penstock.generation.sampling",
    "SearchMemory": "penstock.search.beam_searcher",
    "SearchParams": "penstock.search.search_params",
    "SelectionPolicy": "penstock.engine.policy",
    "Sessions": "penstock.documents.sessions",
    "StepScorer": "penstock.search.step_scorer",
    "TextPrompt": "penstock.generation.prompts",
    "TieredCache": "penstock.models.cache_adapter",
    "TokensPrompt": "penstock.generation.prompts",
    "TunedConfig": "penstock.methods.tuned_config",
    "load": "penstock.models.loader",
    "tune": "penstock.tuner.tune",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
