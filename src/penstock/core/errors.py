"""The exception tree: the world's mistakes, each with what to do about it.

PenstockError
├── ConfigError(ValueError)          a setting is impossible; names the field and the limit
│   ├── BudgetError                  the memory budget is too small, or was passed
│   ├── AdapterError                 a low-rank adapter that does not belong to this model
│   ├── PromptError                  a prompt that cannot be run (empty, too long, unreadable)
│   ├── DocumentMismatchError        a stored document that was made for another model or setting
│   └── UnsupportedModelError        the model cannot work with a tiered cache, and why
├── ModelLoadError                   a model folder that is missing or cannot be read
├── VerifierError                    what rates a search's candidates raised, or gave no ratings
├── StorageError(OSError)
│   ├── StoreFullError               the disk has no room for the KV cache
│   ├── AlignmentError               a direct I/O call that is not sector-aligned
│   ├── FetchError                   a read failed or came up short
│   │   └── DocumentDamagedError     bytes of a stored document are not those that were stored
│   └── DocumentError                a stored document that is missing or unfinished
│       ├── DocumentBusyError        another process has it open
│       ├── DocumentKeyError         no key, the wrong key, or nothing to decrypt with
│       └── DocumentFormatError      written in a newer format, or not by Penstock
├── QueueFullError(RuntimeError)     an engine has as many waiting requests as it takes
└── CacheStateError(RuntimeError)    a call that the cache's present state does not allow

Programmer mistakes are `assert`s; these are for everything else.
"""


class PenstockError(Exception):
    """Base class of every error that Penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """A setting is impossible; the message names the field and the limit."""


class BudgetError(ConfigError):
    """The memory budget is too small, or something asked for more than is left.

    Attributes:
        needed_bytes: the smallest budget that would do, in bytes, when it is known.
        adapter_bytes: what would do with a calibrated adapter, where that is less.
        fitting: names of policies that the budget that was refused would do for.
    """

    def __init__(self, message: str, needed_bytes: int | None = None) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.adapter_bytes: int | None = None
        self.fitting: tuple[str, ...] = ()


class AdapterError(ConfigError):
    """A low-rank adapter is unreadable or was made for another model."""


class PromptError(ConfigError):
    """A prompt cannot be run: empty, unreadable, or longer than the model's positions."""


class DocumentMismatchError(ConfigError):
    """A stored document was made for another model or setting; the message names the field."""


class UnsupportedModelError(ConfigError):
    """The model's attention cannot work with a tiered cache; the message says why."""


class ModelLoadError(PenstockError):
    """A model folder is missing, incomplete, or not a causal language model."""


class VerifierError(PenstockError):
    """The scorer of a search raised, or returned something other than a number per candidate."""


class StorageError(PenstockError, OSError):
    """The disk tier failed."""


class StoreFullError(StorageError):
    """The disk has no room for the KV cache."""


class AlignmentError(StorageError):
    """A direct I/O call whose offset, length or address is not sector-aligned."""


class FetchError(StorageError):
    """A read failed or came up short; carries the original error as its cause."""


class DocumentDamagedError(FetchError):
    """Bytes of a stored document are not those that were stored.

    Attributes:
        layer: of the damaged units; None when the damage is not in units
        units: numbers of the damaged units of that layer
        what: the damaged part: "units", "seals", "manifest", or a file's or blob's name
    """

    def __init__(
        self, message: str, *, layer: int | None = None, units: tuple[int, ...] = (),
        what: str = "units",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.layer = layer
        self.units = units
        self.what = what


class DocumentError(StorageError):
    """A stored document is missing or unfinished, or a folder is not one."""


class DocumentBusyError(DocumentError):
    """Another process has the document open in a way that excludes this."""


class DocumentKeyError(DocumentError):
    """No key, the wrong key, or nothing to decrypt with."""


class DocumentFormatError(DocumentError):
    """A document in a newer format, or a folder of something else."""


class QueueFullError(PenstockError, RuntimeError):
    """An engine has as many waiting requests as it takes; ask again later.

    Attributes:
        retry_after_s: when a place will probably be free, in seconds.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CacheStateError(PenstockError, RuntimeError):
    """The cache's present state does not allow this call (closed, wrong batch, ...)."""
