"""ModelIdentity: what stored KV depends on, field by field: weights, configuration, tokenizer."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from penstock.core.errors import DocumentMismatchError
from penstock.core.shape import KVShape
from penstock.engine.adapter import LowRankAdapter
from penstock.models.model_shape import decoder_config, inspect_model
from penstock.models.packed.quantizer import PackedConfig
from penstock.models.weight_access import readable_weights

FIELDS = ("weights", "configuration", "rope", "dtype", "layout", "tokenizer", "adapter")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct")
_PASSING = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Of a configuration: says where a model came from or how it was loaded, not what it computes."""
_RUN = ("use_cache", "pad_token_id")
"""Of a configuration: how a model is run. Digests hold them as the model's folder has them, so that
setting them on a loaded model changes nothing."""
NONE = "none"
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelIdentity:
    """The part of an identity that belongs to the model and its tokenizer: made once, as every byte
    of the weights is read for it."""

    weights: str
    configuration: str
    rope: str
    dtype: str
    layout: str
    tokenizer: str

    @classmethod
    def of(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
    ) -> "ModelIdentity":
        """Read the model.

        Raises:
            UnsupportedModelError: a weight's values cannot be read.
        """
        config = decoder_config(model).to_dict()
        config |= _as_loaded(model, [name for name in _RUN if name in config])
        rope = {name: config.pop(name, None) for name in _ROPE}
        for name in [*_PASSING, *(name for name in config if name.startswith("_"))]:
            config.pop(name, None)
        shape = inspect_model(model).kv
        return cls(
            weights=_weights(model), configuration=_digest(config), rope=_digest(rope),
            dtype=str(shape.dtype).removeprefix("torch."),
            layout=f"{shape.num_layers} layers of {_widths(shape)}",
            tokenizer=NONE if tokenizer is None else _tokenizer(tokenizer),
        )  # fmt: skip

    def stored(self, adapter: LowRankAdapter | None, *, group_tokens: int) -> dict[str, str]:
        """Everything that keys and values of some text, and their index, depend on.

        Args:
            adapter: that the index is made with; None: none, or one made from the text's own keys.
            group_tokens: of a stored unit.

        Returns:
            A value for each of `FIELDS`.
        """
        return {
            **asdict(self),
            "layout": f"{self.layout}, {group_tokens} tokens a unit",
            "adapter": NONE if adapter is None else _adapter(adapter),
        }


def require_same(stored: Mapping[str, str], present: Mapping[str, str], what: str) -> None:
    """Refuse stored KV that another model would make otherwise.

    Args:
        what: is stored, for the message.

    Raises:
        DocumentMismatchError: names the fields that differ.
    """
    differs = [name for name in FIELDS if stored.get(name) != present.get(name)]
    if not differs:
        return
    changed = [_change(name, stored.get(name), present.get(name)) for name in differs]
    raise DocumentMismatchError(
        f"{what} was stored with other settings: {', '.join(changed)}; give the model that it was "
        "added with, or add the text again"
    )


def _widths(shape: KVShape) -> str:
    """Heads and widths; of values only where they are not those of keys."""
    values = "" if shape.is_even else f" with values of {shape.value_width}"
    inside = " in them" if shape.values_in_keys else ""
    return f"{shape.num_kv_heads} x {shape.head_dim}{values}{inside}"


def _change(name: str, there: str | None, here: str | None) -> str:
    if name == "weights" and there is not None and here is not None:
        there, here = _said_of(there), _said_of(here)
        return name if there == here else f"{name} ({there} there, {here} here)"
    return f"{name} ({there} there, {here} here)" if name in ("dtype", "layout") else name


def _digest(value: object) -> str:
    plain = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(plain.encode(), digest_size=16).hexdigest()


def _as_loaded(model: PreTrainedModel, names: Sequence[str]) -> dict[str, object]:
    """Fields of the decoder's configuration as the model's folder has them; none if it has gone."""
    config: Any = type(model.config)
    try:
        there = config.from_pretrained(model.name_or_path, local_files_only=True)
    except (OSError, ValueError):  # made in memory, or moved away
        return {}
    decoder = there.get_text_config(decoder=True)
    return {name: getattr(decoder, name, None) for name in names}


def weights_of(identity: Mapping[str, str]) -> str | None:
    """The bits of packed weights that an identity names, as `load` takes them; None: plain ones."""
    bits, _, digest = identity.get("weights", "").partition(" ")
    return bits if digest else None


def _said_of(weights: str) -> str:
    """What a person can tell of weights: their bits."""
    return weights_of({"weights": weights}) or "plain weights"


def _weights(model: PreTrainedModel) -> str:
    """A digest; of packed weights with their bits before it."""
    packed: Any = getattr(model.config, "quantization_config", None)
    bits = f"int{packed.bits} " if isinstance(packed, PackedConfig) else ""
    digest = xxhash.xxh3_128()
    for name, weight in readable_weights(model):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        _update(digest, weight)
    return bits + digest.hexdigest()


def _update(digest: "xxhash.xxh3_128", weight: torch.Tensor) -> None:
    flat = weight.detach().contiguous().view(-1)
    step = max(1, _CHUNK_BYTES // flat.element_size())
    for start in range(0, flat.numel(), step):
        digest.update(flat[start : start + step].cpu().view(torch.uint8).numpy().data)


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    said = tokenizer.get_vocab() if backend is None else _said(backend)
    return _digest([said, tokenizer.special_tokens_map])


def _said(backend: Any) -> str:
    """A fast tokenizer as text, without truncation and padding: they are what the newest call left
    (or the file came with), and the next call sets them anew."""
    if backend.truncation is not None or backend.padding is not None:
        backend = type(backend).from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    return str(backend.to_str())


def _adapter(adapter: LowRankAdapter) -> str:
    digest = xxhash.xxh3_128()
    for layer in adapter.layers:
        _update(digest, layer.basis)
        if layer.scale is not None:
            _update(digest, layer.scale)
        _update(digest, layer.peak)
    if adapter.selection_cost:  # it divides the components among the layers
        _update(digest, torch.tensor(adapter.selection_cost, dtype=torch.float32))
    return digest.hexdigest()
