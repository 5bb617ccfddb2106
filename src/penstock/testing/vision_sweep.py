"""The sweep of models that see: every policy over each family, pictures in the prompts.

    python -m penstock.testing.vision_sweep --json vision.json --table vision.md [FAMILY ...]

Tiny random models with processors of their own (`tiny_vision`) are held to the plain model.
"""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import DynamicCache
from transformers.utils import logging

from penstock.core.errors import BudgetError, CacheStateError, UnsupportedModelError
from penstock.documents.document import Document
from penstock.documents.settings import DocumentSettings
from penstock.generation.chat_template import picture_text
from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.methods import POLICIES, KVSwap, SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel
from penstock.testing.family_sweep import SETTINGS, TOLERANCE, FamilyResult, Setting, sized_policy
from penstock.testing.tiny_vision import VISION_FAMILIES, tiny_picture, tiny_vision_model

NEW_TOKENS, MAX_TOKENS, CHUNK = 4, 160, 13
_GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


class Wrong(Exception):
    """What is not the plain model's."""


def sweep_family(family: str, policies: Sequence[str] = tuple(POLICIES)) -> FamilyResult:
    """Run policies over one family, and use caches as users do; never raises for what it does."""
    loaded = tiny_vision_model(family)
    name, inputs = type(loaded.model).__name__, _batch(loaded)
    expected, worked = _generate(loaded, DynamicCache(config=loaded.model.config), inputs), []
    try:
        for policy in policies:
            for setting in SETTINGS:
                _run(loaded, policy, setting, inputs, expected)
            worked.append(policy)
        life = {name: do(loaded) for name, do in LIFE.items()}
    except UnsupportedModelError as refused:
        said = {"text": _text(loaded)}
        return FamilyResult(family, "refused", str(refused), name, (), said)
    except Exception as error:
        words = " ".join(str(error).split())
        return FamilyResult(
            family, "fails", f"{type(error).__name__}: {words}", name, tuple(worked)
        )
    return FamilyResult(family, "works", "", name, tuple(worked), life)


def _mark(loaded: LoadedModel) -> str:
    return picture_text(loaded, "image")


def _processed(loaded: LoadedModel, texts: list[str], pictures: list[list[Any]]) -> Any:
    tokenizer: Any = loaded.tokenizer
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    images = [[Image.fromarray(each) for each in row] for row in pictures]
    return loaded.processor(text=texts, images=images, padding=True, return_tensors="pt")


def _batch(loaded: LoadedModel) -> Any:
    """Two rows with three pictures; the second is padded."""
    mark, pictures = _mark(loaded), [tiny_picture(0, 84, 84), tiny_picture(1, 56, 112)]
    texts = [f"look {mark} at this {mark} thing, of some kind", f"and {mark} now"]
    return _processed(loaded, texts, [pictures, pictures[1:]])


def _generate(loaded: LoadedModel, cache: Any, inputs: Any) -> Any:
    model: Any = loaded.model
    return model.generate(
        **inputs, **cache_argument(model, cache), max_new_tokens=NEW_TOKENS, do_sample=False,
        pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip


def _run(loaded: LoadedModel, policy: str, setting: Setting, inputs: Any, expected: Any) -> None:
    with _cache(loaded, sized_policy(policy, 10**6 if setting == "full" else 16), setting) as cache:
        found = _generate(loaded, cache, inputs)
        read, chosen = cache.stats.decode.read_bytes, cache.policy
    plain, mine = torch.stack(expected.logits), torch.stack(found.logits)
    if setting == "fetched":
        if not mine.isfinite().all() or not (read or chosen.drops or chosen.stays_resident):
            raise Wrong(f"{policy}: nothing was fetched, or logits are not finite")
        return
    apart = float((plain - mine).abs().max() / plain.abs().max())
    if apart > TOLERANCE or not torch.equal(expected.sequences, found.sequences):
        raise Wrong(f"{policy}, {setting}: logits are {apart:.1e} from the plain model's")


def _cache(loaded: LoadedModel, policy: SelectionPolicy, setting: Setting) -> TieredCache:
    options: dict[str, Any] = {
        "store": "memory", "max_tokens": MAX_TOKENS, "batch_size": 2, "exact": setting == "exact",
    }  # fmt: skip
    memory: str | None = None if setting == "full" else "1/2"
    try:
        return TieredCache(loaded.model, policy, memory, **options)
    except BudgetError as error:
        return TieredCache(loaded.model, policy, error.needed_bytes, **options)


# A cache in use -------------------------------------------------------------------------------


def _plain(loaded: LoadedModel, text: str, pictures: list[Any]) -> list[int]:
    inputs = _processed(loaded, [text], [pictures]) if pictures else _words(loaded, text)
    found = _generate(loaded, DynamicCache(config=loaded.model.config), inputs).sequences
    return [int(token) for token in found[0, inputs["input_ids"].shape[1] :]]


def _words(loaded: LoadedModel, text: str) -> Any:
    return loaded.processor(text=[text], return_tensors="pt")


def _equal(where: str, found: Sequence[int], right: Sequence[int]) -> None:
    if list(found) != list(right):
        raise Wrong(f"{where}: other tokens than the plain model's")


def _exactly(loaded: LoadedModel) -> LLM:
    return LLM(loaded, memory="1MiB", store="memory", exact=True, prefill_chunk_size=CHUNK)


def _padded(loaded: LoadedModel) -> str:
    """Three rows, pictures cut by chunks, one without any."""
    mark, pictures = _mark(loaded), [tiny_picture(i, 84, 112) for i in range(2)]
    rows = [(f"a {mark} b {mark} c", pictures), (f"see {mark}", pictures[1:]), ("only words", [])]
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": given}} for text, given in rows
    ]  # fmt: skip
    outputs = _exactly(loaded).generate(prompts, _GREEDY, use_tqdm=False)
    for output, (text, given) in zip(outputs, rows, strict=True):
        _equal("a padded batch in chunks", output.token_ids, _plain(loaded, text, given))
    return "right"


def _turns(loaded: LoadedModel) -> str:
    """A second turn behind a first, another model's call between them, and back behind a picture;
    a way back into a picture is refused."""
    inputs = _processed(loaded, [f"look {_mark(loaded)} here"], [[tiny_picture(2, 112, 84)]])
    more = torch.tensor([[40, 41, 42, 43]])
    policy = KVSwap(group_tokens=4, selected_tokens=16, window_tokens=8, sink_tokens=4)
    with TieredCache(
        loaded.model, policy, "300KiB", "memory", max_tokens=MAX_TOKENS, exact=True
    ) as cache:
        plain = DynamicCache(config=loaded.model.config)
        first = _generate(loaded, plain, inputs).sequences
        again = {"input_ids": torch.cat([first, more], dim=1)}
        second = _generate(loaded, plain, again).sequences
        _equal("a prompt", _generate(loaded, cache, inputs).sequences[0].tolist(), first[0])
        _generate(loaded, DynamicCache(config=loaded.model.config), _batch(loaded))
        for where in ("a second turn", "behind crop()"):
            found = _generate(loaded, cache, again).sequences
            _equal(where, found[0].tolist(), second[0].tolist())
            cache.crop(first.shape[1] - 1)
        if cache.decoder_calls is None or not cache.decoder_calls.has_axes:
            return "right"
        cache.crop(8)
        try:
            _generate(loaded, cache, {"input_ids": first})
        except CacheStateError:
            return "right"
    raise Wrong("a picture that was cut in two was not refused")


def _document(loaded: LoadedModel) -> str:
    """A stored text with a picture, opened again behind another prompt."""
    text, picture = f"of {_mark(loaded)} this", tiny_picture(3, 84, 112)
    settings = DocumentSettings(store="memory", prefill_chunk_size=CHUNK)
    given: Any = {"prompt": text, "multi_modal_data": {"image": picture}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document"
        Document.create(loaded, given, path, memory=None, settings=settings).close()
        _generate(loaded, DynamicCache(config=loaded.model.config), _batch(loaded))
        with Document.open(loaded, path, settings=settings) as document:
            [output] = document.ask(" what?", _GREEDY, exact=True)
    _equal("a reopened document", output.token_ids, _plain(loaded, f"{text} what?", [picture]))
    return "right"


def _text(loaded: LoadedModel) -> str:
    """A prompt without pictures."""
    text = "a text that has no pictures in it"
    [output] = _exactly(loaded).generate(text, _GREEDY, use_tqdm=False)
    _equal("a text", output.token_ids, _plain(loaded, text, []))
    return "right"


LIFE: dict[str, Callable[[LoadedModel], str]] = {
    "text": _text, "padded": _padded, "turns": _turns, "document": _document,
}  # fmt: skip
"""What is tried, by name."""


def main(arguments: list[str] | None = None) -> int:
    """Sweep and write what was found; 1 where a family fails."""
    parser = argparse.ArgumentParser(prog="vision_sweep", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--table", type=Path, help="where to write them as Markdown")
    args = parser.parse_args(arguments)
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family in args.families or VISION_FAMILIES:
            results.append(sweep_family(family))
            sys.stdout.write(f"{family}: {results[-1].outcome} {results[-1].words}\n")
            sys.stdout.flush()
    found = {
        "transformers": transformers.__version__, "torch": torch.__version__.split("+")[0],
        "policies": list(POLICIES), "settings": list(SETTINGS),
        "families": [asdict(result) for result in results],
    }  # fmt: skip
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.table is not None:
        args.table.write_text(table(found), encoding="utf-8")
    return int(any(result.outcome == "fails" for result in results))


def table(found: dict[str, Any]) -> str:
    """The results as a page of Markdown."""
    intro = (
        f"Small random models of these families were run on transformers {found['transformers']} "
        f"with pictures in their prompts, under {len(found['policies'])} policies, in float32. "
        "Exact, and at the full budget, they give the plain model's tokens, and its logits to a "
        f"relative {TOLERANCE:g}. Beside that: three padded rows read in chunks that cut pictures, "
        "a second turn with another prompt on the model between, a way back, and a document with a "
        "picture that was opened again."
    )
    lines = ["# Model families that see", "", intro, "", "| family | pictures | text | words |",
             "| --- | --- | --- | --- |"]  # fmt: skip
    lines += [
        f"| `{each['family']}` | {each['outcome']} | {each['life'].get('text', '')} | "
        f"{each['words']} |"
        for each in found["families"]
    ]
    return "\n".join([*lines, "", "`make sweep` writes this page.", ""])


if __name__ == "__main__":
    sys.exit(main())
