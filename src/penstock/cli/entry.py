"""The process's entry point: guards even the imports against Ctrl-C."""

import os
import signal
import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line of this process."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from penstock.cli.main import app

        app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    finally:
        # What is left to do takes no time; a second Ctrl-C must not turn it into a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
