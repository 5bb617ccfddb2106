"""Pace: how fast this machine is at the moment, by a small work that is always the same.

A machine that others use too does the same decode step in 12 ms and, seconds later, in 20: its
last-level cache and its cores are not ours alone. A forward pass over one token, right before and
behind a round of steps, slows down with them (the logarithms correlate at 0.84 on two cores of such
a machine): times divided by it scatter by 4 % where times alone scatter by 15.
"""

import time

import numpy as np
import torch

from penstock.models.loader import CausalLM
from penstock.models.weight_access import model_device

_PASSES, _ENOUGH_S = 5, 0.02


class Pace:
    """Call it for the seconds that a forward pass over one token takes now.

    Args:
        model: whose weights are read; it is run without a cache.
    """

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._device = model_device(model)

    def __call__(self) -> float:
        """The median of a few passes, one where they take long."""
        token = torch.ones(1, 1, dtype=torch.int64, device=self._device)
        taken: list[float] = []
        with torch.no_grad():
            while len(taken) < _PASSES and sum(taken) < _ENOUGH_S:
                start = time.perf_counter()
                self._model(token, use_cache=False)
                if self._device.type == "cuda":
                    torch.cuda.synchronize()
                taken.append(time.perf_counter() - start)
        return float(np.median(taken))
