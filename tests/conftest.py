"""What every test needs before the first module is imported."""

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# No example is refused for being slow: the machine may be at something else meanwhile. What the
# default profile says otherwise stays (where CI is set: the same examples each time).
settings.register_profile(
    "penstock", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
)
settings.load_profile("penstock")

if not torch.cuda.is_available():
    # Kernels in Triton run in its interpreter. It must be told before anything imports Triton,
    # which transformers does, so that this stands above the tests of the kernels.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module", autouse=True)
def _settled_heap() -> None:
    """Collections look only at what a module's tests made, not at all of torch and transformers.

    Benchmarks collect before each figure of memory; what lives already is no test's garbage.
    """
    gc.collect()
    gc.freeze()
