"""family_life(): a family's cache in use: turns, chunks, padding, going back, a stored document."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock.core.errors import CacheStateError, UnsupportedModelError
from penstock.documents.document import Document
from penstock.documents.settings import DocumentSettings
from penstock.methods import KVSwap
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.own_cache import own_cache_class
from penstock.testing.tiny_families import VOCABULARY

PADDING = (7, 0, 31)
"""Of three rows, on their left."""
PROMPT, TURN, NEW, CHUNK, BACK = 52, 12, 3, 17, 6
_COUNTS_CHUNKS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 21)
"""Before, transformers lost count in chunked prefill, with its own caches too."""
TOLERANCE = 1e-4
"""Of logits, as a share of the largest."""
_POLICY = KVSwap(group_tokens=8, window_tokens=8, selected_tokens=16, sink_tokens=4)


class Wrong(Exception):
    """What is not the plain model's."""


def family_life(model: PreTrainedModel) -> dict[str, str]:
    """Use a cache as its users do, and hold all of it to the plain model.

    Returns:
        By what was tried: "right", "refused", or "plain model fails" where nothing is to compare.

    Raises:
        Wrong: another answer than the plain model's; says where.
        PenstockError: what should work was refused.
    """
    return {name: do(model) for name, do in LIFE.items()}


def _ids(rows: int, tokens: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=draw)


def _tiered(model: PreTrainedModel, rows: int) -> TieredCache:
    return TieredCache(
        model, _POLICY, store="memory", max_tokens=2 * PROMPT, batch_size=rows, exact=True
    )


def _generate(
    model: Any, cache: Any, ids: Tensor, mask: Tensor | None = None, **options: Any
) -> Any:
    return model.generate(
        ids, attention_mask=torch.ones_like(ids) if mask is None else mask,
        **cache_argument(model, cache), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **{"eos_token_id": None, **options},
    )  # fmt: skip


def _compare(where: str, right: Any, found: Any) -> None:
    plain, mine = torch.stack(right.logits), torch.stack(found.logits)
    apart = float((plain - mine).abs().max() / plain.abs().max())
    if apart > TOLERANCE or not torch.equal(right.sequences, found.sequences):
        raise Wrong(f"{where}: logits are {apart:.1e} from the plain model's")


def _plain(model: PreTrainedModel, *calls: tuple[Any, ...], **options: Any) -> list[Any] | None:
    """What the plain model says, call by call on one cache; None where it cannot.

    MiniMax's own cache loses padding (docs/internals/index.md): that model reads all of it anew.
    """
    try:
        if own_cache_class(model) is not None:
            return [_generate(model, None, *call, **options, use_cache=False) for call in calls]
        cache = DynamicCache(config=model.config)
        return [_generate(model, cache, *call, **options) for call in calls]
    except Exception:
        return None


def _turns(model: PreTrainedModel) -> str:
    """Three padded rows, a prompt in chunks, an answer, another prompt behind it."""
    ids, mask = _ids(3, PROMPT, 1), torch.ones(3, PROMPT, dtype=torch.int64)
    for row, count in enumerate(PADDING):
        ids[row, :count], mask[row, :count] = 0, 0
    [first] = _plain(model, (ids, mask)) or [None]
    if first is None:
        return "plain model fails"
    more = torch.cat([first.sequences, _ids(3, TURN, 2)], dim=1)
    longer = torch.cat([mask, torch.ones(3, NEW + TURN, dtype=torch.int64)], dim=1)
    both = _plain(model, (ids, mask), (more, longer))
    with _tiered(model, 3) as cache:
        chunk = CHUNK if cache.takes_chunks and _COUNTS_CHUNKS else None
        found = _generate(model, cache, ids, mask, prefill_chunk_size=chunk)
        _compare("a padded batch in chunks", first, found)
        if both is None:
            return "plain model fails"
        try:
            _compare("a second turn", both[1], _generate(model, cache, more, longer))
        except UnsupportedModelError:
            return "refused"
    return "right"


def _crop(model: PreTrainedModel) -> str:
    """Other tokens behind a part of what was read."""
    ids = _ids(1, PROMPT, 3)
    other = torch.cat([ids[:, : PROMPT - BACK], _ids(1, BACK, 4)], dim=1)
    right = _plain(model, (other,))
    if right is None:
        return "plain model fails"
    with _tiered(model, 1) as cache, torch.no_grad():
        _generate(model, cache, ids)
        try:
            cache.crop(PROMPT - BACK)
        except CacheStateError:
            return "refused"
        _compare("behind crop()", right[0], _generate(model, cache, other))
    return "right"


def _lookup(model: PreTrainedModel) -> str:
    """Drafts from the prompt itself, which say the same or are refused."""
    ids = _ids(1, PROMPT // 2, 5).repeat(1, 2)
    right = _plain(model, (ids,))
    if right is None:
        return "plain model fails"
    with _tiered(model, 1) as cache:
        try:
            # Older releases look for an end among the drafts, whether there is one or not.
            found = _generate(
                model, cache, ids, prompt_lookup_num_tokens=3, eos_token_id=VOCABULARY
            )
        except (CacheStateError, ValueError):
            return "refused"
    if not torch.equal(found.sequences, right[0].sequences):
        raise Wrong("prompt lookup: other tokens than the plain model's")
    return "right"


def _document(model: PreTrainedModel) -> str:
    """A stored text, opened again; a cache over it goes on as a new one does."""
    ids = _ids(1, PROMPT + TURN, 6)
    right = _plain(model, (ids,))
    if right is None:
        return "plain model fails"
    settings = DocumentSettings(store="memory", prefill_chunk_size=CHUNK)
    with tempfile.TemporaryDirectory() as folder:
        path, whole = Path(folder) / "document", KVSwap(group_tokens=8, selected_tokens=10**6)
        Document.create(
            model, ids[0, :PROMPT].tolist(), path, policy=whole, memory=None, settings=settings
        ).close()
        with Document.open(model, path, settings=settings) as document:
            for exact in (False, True):
                with document.cache(new_tokens=TURN + NEW, exact=exact) as cache:
                    try:
                        found = _generate(model, cache, ids)
                    except UnsupportedModelError:
                        return "refused"
                    _compare("a reopened document", right[0], found)
    return "right"


LIFE = {"turns": _turns, "crop": _crop, "lookup": _lookup, "document": _document}
"""What is tried, by name."""
