"""What `--log-level` shows on stderr: what Penstock and the libraries below it log."""

import json
import logging
import os
import sys
import warnings
from enum import StrEnum

from penstock.core.printable import printable

LIBRARIES = ("transformers", "huggingface_hub")


class LogLevel(StrEnum):
    """What `--log-level` takes."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _Stderr(logging.Handler):
    """Writes each record as a line, without what a terminal would obey."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write it to what is stderr now."""
        print(printable(self.format(record)), file=sys.stderr)


class _Json(logging.Formatter):
    """Each record as a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Time in epoch seconds, level, logger, message, and what the record brings besides."""
        said: dict[str, object] = {
            "time": record.created, "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage(), **getattr(record, "fields", {}),
        }  # fmt: skip
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False, default=str)


def log_as_json() -> None:
    """Show what Penstock logs as lines of JSON, from "info" on at least."""
    own = logging.getLogger("penstock")
    own.setLevel(min(own.level, logging.INFO))
    for each in own.handlers:
        each.setFormatter(_Json())


def show_logs(level: LogLevel, *, warn: bool = False) -> None:
    """Show what is logged from a level on.

    Args:
        warn: show Python's warnings at any level; else none where only errors are shown.
    """
    number = logging.getLevelNamesMapping()[level.value.upper()]
    own = logging.getLogger("penstock")
    own.setLevel(number)
    if not any(isinstance(each, _Stderr) for each in own.handlers):
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        own.addHandler(handler)
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(number)
    if level != LogLevel.ERROR:
        # Set anew by these libraries when they are imported.
        os.environ["TRANSFORMERS_VERBOSITY"] = level.value
        os.environ["HF_HUB_VERBOSITY"] = level.value
    elif not (warn or sys.warnoptions):
        warnings.simplefilter("ignore")
