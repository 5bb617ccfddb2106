"""States of recurrent layers in a stored document: behind its text, and at ends of former turns."""

from collections.abc import Iterable

from safetensors.torch import save

from penstock.core.errors import DocumentDamagedError
from penstock.documents.contents import blob_tensors
from penstock.models.cache_adapter import TieredCache
from penstock.storage.documents import StoredDocument

KEPT_STATES = 3
"""States that a document keeps, the newest ones: damage is prefilled again from the last of them in
front of it."""
_PREFIX = "states-"


def states_name(length: int) -> str:
    """Name of the blob with the states behind so many tokens."""
    return f"{_PREFIX}{length}"


def state_lengths(names: Iterable[str]) -> list[int]:
    """Tokens behind which a document has states, ascending."""
    numbers = [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]
    return sorted(int(number) for number in numbers if number.isdecimal())


def former_states(names: Iterable[str], length: int) -> list[str]:
    """Blobs of states that stay beside those behind a longer text.

    Args:
        names: of the blobs that are there.
        length: tokens that both texts have in front.
    """
    held = [each for each in state_lengths(names) if each <= length]
    return [states_name(each) for each in held[-(KEPT_STATES - 1) :]]


def states_blob(cache: TieredCache) -> dict[str, bytes]:
    """The states of a cache's recurrent layers, as one blob; none without such."""
    tensors = {
        f"{layer}.{name}": state[:1].detach().cpu().contiguous()
        for layer, held in cache.recurrent_layers.items()
        for name, state in held.state_tensors().items()
    }
    return {states_name(cache.get_seq_length()): save(tensors)} if tensors else {}


def restore_states(stored: StoredDocument, cache: TieredCache, length: int) -> None:
    """Give a cache's recurrent layers their states behind the first `length` tokens, in every row;
    `crop` can bring them again from then on.

    Raises:
        DocumentDamagedError: they are not what was stored, or not there.
    """
    if not cache.is_recurrent or length == 0:
        return

    def load() -> None:
        _load(stored, cache, length)

    load()
    cache.states_stored(length, load)


def _load(stored: StoredDocument, cache: TieredCache, length: int) -> None:
    name, device, rows = states_name(length), cache.device, max(1, cache.batch_size)
    wrong = DocumentDamagedError(
        f"the document's {name} are not what its model has; restore it, or add the text anew",
        what=name,
    )
    if name not in stored.blob_names:
        raise wrong
    tensors = blob_tensors(stored, name)
    try:
        for layer, held in cache.recurrent_layers.items():
            own = {
                key.removeprefix(f"{layer}."): state.to(device).expand(rows, *state.shape[1:])
                for key, state in tensors.items()
                if key.startswith(f"{layer}.")
            }
            if not all(bool(state.isfinite().all()) for state in own.values()):
                raise wrong
            held.hold(own, length)
    except (ValueError, RuntimeError, IndexError) as error:
        raise wrong from error
