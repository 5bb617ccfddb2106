"""make_layers() and its kin: the layers that a plan asks for, with their memory."""

from collections.abc import Sequence

import torch

from penstock.core.shape import KVShape
from penstock.core.slot_plan import SlotPlan
from penstock.engine.device_tier.device_index import StepClock
from penstock.engine.device_tier.device_layer import DeviceLayer, DeviceSetup
from penstock.engine.device_tier.device_pool import make_pools
from penstock.engine.device_tier.whole_layer import WholeLayer
from penstock.engine.device_tier.workspace import Workspace
from penstock.engine.layer import Layer
from penstock.engine.layer_builder import LayerBuilder, index_request
from penstock.engine.layer_cache import LayerCache, LayerSetup
from penstock.engine.policy import SelectionPolicy
from penstock.engine.resident_layer import ResidentLayer
from penstock.engine.runtime_settings import RuntimeSettings


def resident_layers(
    count: int, shape: KVShape, plan: SlotPlan, max_tokens: int, device: torch.device
) -> list[Layer]:
    """The first `count` layers, all of each in fast memory. shape: of a row."""
    return [ResidentLayer(i, shape, plan.batch, max_tokens, device) for i in range(count)]


def make_layers(
    settings: RuntimeSettings, policy: SelectionPolicy, setup: LayerSetup
) -> list[Layer]:
    """All layers of a tiered cache; those that the policy keeps whole come first.

    Args:
        policy: with every open choice made, as `plan` returned it.
    """
    retrieves = policy.retrieves and not settings.exact
    whole = 0 if settings.exact else policy.whole_layers
    layers = resident_layers(whole, setup.shape, setup.plan, settings.max_tokens, settings.device)
    builder = LayerBuilder(settings, setup, range(whole, settings.shape.num_layers))
    tiered: Sequence[Layer]
    if retrieves:
        tiered = policy.make_layers(builder)
    else:
        tiered = [LayerCache(i, setup, builder.pool(i)) for i in builder.numbers]
    return [*layers, *tiered]


def device_layers(
    settings: RuntimeSettings, policy: SelectionPolicy, plan: SlotPlan, shape: KVShape,
    rows_per_sequence: int, clock: StepClock,
) -> list[Layer]:  # fmt: skip
    """All layers of the device tier; those that the policy keeps whole come first.

    Args:
        policy: with every open choice made, as `plan` returned it.
        shape: of a row.
    """
    whole = 0 if settings.exact else policy.whole_layers
    count = 2 if plan.shared_pools else settings.shape.num_layers - whole
    pools, memory = make_pools(count, plan, shape, settings.device)
    setup = DeviceSetup(
        shape=shape, plan=plan, device=settings.device, clock=clock,
        workspace=Workspace(plan, shape, memory),
    )  # fmt: skip
    size = (plan.batch, settings.max_tokens, clock)
    layers: list[Layer] = [WholeLayer(i, shape, *size) for i in range(whole)]
    for i in range(whole, settings.shape.num_layers):
        index = None
        if policy.retrieves and not settings.exact:
            request = index_request(i, settings, plan, shape, rows_per_sequence)
            index = policy.make_device_index(request)
        layers.append(DeviceLayer(i, setup, index, pools[(i - whole) % count]))
    return layers
