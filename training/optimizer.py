"""Muon for the matrices of the layers, AdamW for the embedding and the norms."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from training import settings as plans

_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Momentum whose update of a matrix is made orthogonal.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024):
    Nesterov momentum, five Newton-Schulz steps, updates scaled by sqrt(rows / columns) where a
    matrix is tall. Matrices of one shape are done together.

    Args:
        params: matrices.
        lr: learning rate; a group's may be a tensor of one number.
        momentum: share of the old update that stays.
        weight_decay: decoupled; the share of a weight that a step takes away, times `lr`.
    """

    def __init__(
        self, params: Iterable[Tensor], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Change the weights by their gradients; without a gradient a weight stays."""
        assert closure is None
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for parameters in alike.values():
                self._step_alike(parameters, group)

    def _step_alike(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        momentum, rate = group["momentum"], group["lr"]
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        moments = [self.state[parameter]["momentum"] for parameter in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_lerp_(moments, gradients, 1 - momentum)
        updates = torch.stack(torch._foreach_lerp(gradients, moments, momentum))
        rows, columns = parameters[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        changes = orthogonal(updates).to(updates.dtype) * (-rate * scale)
        torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, changes.unbind())


def orthogonal(matrices: Tensor) -> Tensor:
    """About U V^T of each matrix U S V^T: singular values of 0.7 to 1.2. [count, rows, columns]

    bfloat16 on a GPU, float32 on a CPU.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    result: Tensor = x.mT if tall else x
    return result


class Optimizers:
    """Both optimizers under one schedule.

    Args:
        model: whose parameters are trained; the embedding is used for the logits too.
        plan: learning rates and momenta.
        recorded: for a recorder: learning rates lie on the GPU, and gradients stay where they are.
    """

    def __init__(
        self, model: nn.Module, plan: "plans.Optimizer", *, recorded: bool = False
    ) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim == 2 and "embed" not in name
            (matrices if is_matrix else others).append(parameter)
        on_gpu = others[0].is_cuda
        self._rates = (plan.matrix_rate, plan.other_rate)
        self._capturable = recorded and on_gpu
        self._all: tuple[torch.optim.Optimizer, ...] = (
            Muon(
                matrices, lr=plan.matrix_rate, momentum=plan.matrix_momentum,
                weight_decay=plan.matrix_decay,
            ),
            torch.optim.AdamW(
                others, lr=plan.other_rate, betas=plan.other_betas, weight_decay=0.0, fused=on_gpu,
                capturable=self._capturable,
            ),
        )  # fmt: skip
        self._held: tuple[Tensor, ...] | None = None
        if recorded:
            self._held = tuple(torch.zeros((), device=others[0].device) for _ in self._all)
            for parameter in (*matrices, *others):
                parameter.grad = torch.zeros_like(parameter)

    def step(self, factor: float) -> None:
        """Change the parameters with learning rates times `factor`, and forget the gradients."""
        self.set_rates(factor)
        self.apply()

    def set_rates(self, factor: float) -> None:
        """Learning rates from now on: those of the plan times `factor`."""
        for at, (optimizer, rate) in enumerate(zip(self._all, self._rates, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor if self._held is None else self._held[at]
            if self._held is not None:
                self._held[at].fill_(rate * factor)

    def apply(self) -> None:
        """Change the parameters, and forget the gradients."""
        for optimizer in self._all:
            optimizer.step()
            optimizer.zero_grad(set_to_none=self._held is None)

    def state_dict(self) -> list[dict[str, Any]]:
        """For a checkpoint."""
        return [optimizer.state_dict() for optimizer in self._all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take up a checkpoint's."""
        for optimizer, state in zip(self._all, states, strict=True):
            optimizer.load_state_dict(state)
            for group in optimizer.param_groups:
                if "capturable" in group:  # a checkpoint's may be of another kind
                    group["capturable"] = self._capturable
