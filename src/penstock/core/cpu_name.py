"""What the processor is called."""

import platform
from pathlib import Path


def cpu_name() -> str:
    """The CPU's model, or the architecture where the system does not say more."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except (OSError, UnicodeDecodeError):
        pass
    return platform.processor() or platform.machine()
