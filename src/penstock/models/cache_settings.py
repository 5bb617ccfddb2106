"""What the arguments of a TieredCache mean: policy, budget, and which tier serves it."""

from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel

from penstock.core.byte_size import is_share, parse_memory
from penstock.core.errors import ConfigError, UnsupportedModelError
from penstock.core.shape import KVShape
from penstock.engine.adapter import LowRankAdapter
from penstock.kernels.key_rotation import KeyRotation
from penstock.methods import POLICIES, SelectionPolicy
from penstock.models.bundled_adapter import NO_ADAPTER, find_adapter, told_adapter
from penstock.models.known_model import ModelAnswers
from penstock.models.model_shape import ModelShape


def named_policy(policy: str | SelectionPolicy) -> SelectionPolicy:
    """The policy of a name.

    Raises:
        ConfigError: there is none, or another package's cannot be used.
    """
    return policy if isinstance(policy, SelectionPolicy) else POLICIES.find(policy)()


def find_basis(
    model: PreTrainedModel, shape: ModelShape, policy: SelectionPolicy,
    adapter: str | Path | LowRankAdapter | None, notices: list[str], *, exact: bool,
    known: ModelAnswers,
) -> LowRankAdapter | None:  # fmt: skip
    """The low-rank adapter that a cache works with; None where it needs none, or makes its own.

    Args:
        adapter: what the user gave; None: one that is at hand; "none": none.
        notices: gets a line where there is none, and where one was found.
        known: of the model.

    Raises:
        AdapterError: it was made for another model, or cannot be read.
    """
    if not policy.uses_adapter or exact:
        return None
    found = _adapter_of(model, shape, adapter, known)
    if found is not None and found.block_tokens not in (0, policy.index_block):
        notices.append(
            f"the adapter is of keys by blocks of {found.block_tokens} tokens, which "
            f"index_block_tokens={policy.index_block} is not: a basis is made from the prompt's "
            "own keys"
        )
        return None
    if found is not None and policy.index_block and not found.block_tokens:
        notices.append(
            "the adapter is of keys as the model turns them, so that the index has those: one that "
            "`penstock calibrate` makes now finds more with as many bytes"
        )
    if found is None and adapter is None:
        notices.append(
            "no low-rank adapter at hand: one is made from the prompt's own keys (`penstock "
            "calibrate MODEL` makes a better one, once)"
        )
    elif found is not None and adapter is None and (told := told_adapter(found)) is not None:
        notices.append(told)
    return found


def _adapter_of(
    model: PreTrainedModel, shape: ModelShape, given: str | Path | LowRankAdapter | None,
    known: ModelAnswers,
) -> LowRankAdapter | None:  # fmt: skip
    """The adapter that was given, or one that is at hand."""
    if given == NO_ADAPTER or given == Path(NO_ADAPTER):
        return None
    digest = known.fingerprint()
    if given is None:
        given = find_adapter(digest, model.name_or_path, known.adapter)
    if given is None:
        return None
    loaded = given if isinstance(given, LowRankAdapter) else known.adapter(given)
    loaded.check(digest, shape.kv.num_layers, shape.kv.joint_dim)
    return loaded


def serves_device_tier(
    store: str, policy: SelectionPolicy, device: torch.device, shape: KVShape, *, exact: bool
) -> bool:
    """Whether the device tier serves this cache.

    Values of another width than keys are kept by the other tiers, also on CUDA.

    Raises:
        ConfigError: it was asked for and the policy cannot.
        UnsupportedModelError: it was asked for and the widths differ.
    """
    in_steps = (
        getattr(policy, "mass", None) is not None or getattr(policy, "tail", "none") != "none"
    )
    able = (policy.device_tier and not in_steps) or exact
    if store == "host":
        if not able and not policy.stays_resident:
            known = ", ".join(name for name, each in POLICIES.items() if each.device_tier)
            raise ConfigError(
                f"store=host is for {known}; give {policy.name} a store on disk, or memory"
            )
        if getattr(policy, "reuse_tokens", None) == 0:
            raise ConfigError("reuse_tokens=0 is for stores on disk: here every layer has slots")
        if not shape.is_even:
            raise UnsupportedModelError(
                f"keys of this model are {shape.head_dim} wide and its values {shape.value_width}: "
                "the kernels of store=host know one width; give a store on disk, or memory"
            )
        return True
    return store == "memory" and device.type == "cuda" and able and shape.is_even


def true_query_layers(policy: SelectionPolicy, adapter: LowRankAdapter | None) -> frozenset[int]:
    """Tiered layers whose query calibration found not worth predicting."""
    cosines = () if adapter is None else adapter.prediction_cosine
    return frozenset(i for i, c in enumerate(cosines) if not policy.trusts_prediction(c))


def measured_prediction(
    model: PreTrainedModel, shape: ModelShape, policy: SelectionPolicy,
    adapter: str | Path | LowRankAdapter | None, notices: list[str], *, exact: bool,
    known: ModelAnswers,
) -> LowRankAdapter | None:  # fmt: skip
    """The adapter that says how well a method's queries are predicted that works without one.

    Args:
        adapter: what the user gave; None: one that is at hand; "none": none.
        notices: gets a line where none says so.
        known: of the model.

    Raises:
        AdapterError: it was made for another model, or cannot be read.
    """
    if exact or policy.uses_adapter or not policy.predicts_on_device:
        return None
    found = _adapter_of(model, shape, adapter, known)
    if found is None or not found.prediction_cosine:
        notices.append(
            "nothing says how well this model's queries are predicted, so that those of all layers "
            "but the first are: `penstock calibrate` measures it"
        )
    return found


def find_rotations(
    model: PreTrainedModel, shape: ModelShape, policy: SelectionPolicy,
    basis: LowRankAdapter | None, notices: list[str], *, exact: bool, known: ModelAnswers,
) -> list[KeyRotation | None] | None:  # fmt: skip
    """How the layers' keys turn, for policies whose index turns them back.

    Args:
        basis: what `find_basis` found; one of keys as the model has them needs no rotation.
        notices: gets a line where no layer's is known.
        known: of the model.
    """
    if exact or not policy.index_block or (basis is not None and not basis.block_tokens):
        return None
    found = known.rotations(shape)
    if not any(found):
        notices.append(
            "no rotary embedding of a known form: the index has keys as the model has them, as "
            "KVSwap's paper does"
        )
        return None
    return found


def is_auto(memory: int | float | str | None) -> bool:
    """Whether a user leaves the budget to us."""
    return isinstance(memory, str) and memory.strip().lower() == "auto"


def limit_bytes(
    memory: int | float | str | None, full_bytes: int, device: torch.device, state_bytes: int = 0
) -> int | None:
    """The budget that a user's `memory` means, in bytes.

    Args:
        state_bytes: of recurrent layers; they are part of a size, and come on top of a share.

    Raises:
        ConfigError: it means nothing.
    """
    if memory is None:
        return None
    limit = parse_memory(memory, full_bytes, free_bytes(device))
    if _is_whole(memory, limit, full_bytes):
        limit += full_bytes // 64 + 4096  # its mask comes on top of its keys and values
    return limit + state_bytes if is_share(memory) else limit


def beams_limit_bytes(
    memory: int | float | str | None, full_bytes: int, device: torch.device
) -> int | None:
    """The same for the beams of a search, of which everything is more than keys and values; None:
    as much as that takes.

    Raises:
        ConfigError: it means nothing.
    """
    if memory is None:
        return None
    limit = parse_memory(memory, full_bytes, free_bytes(device))
    return None if _is_whole(memory, limit, full_bytes) else limit


def _is_whole(memory: int | float | str, limit: int, full_bytes: int) -> bool:
    """Whether everything was meant: a share of one, or "auto" with memory to spare."""
    return not isinstance(memory, int) and limit == full_bytes


def free_bytes(device: torch.device) -> int:
    """Memory of a device that is not in use now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
