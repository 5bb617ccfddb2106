"""The sweep: every policy over every decoder family of transformers, against the plain model.

    python -m penstock.testing.family_sweep --json families.json --table families.md [FAMILY ...]

A family works with a policy, or is refused by `UnsupportedModelError`; there is no third outcome.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from penstock.core.errors import BudgetError, UnsupportedModelError
from penstock.methods import POLICIES, SelectionPolicy
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.own_cache import own_cache_class
from penstock.testing.family_life import LIFE, family_life
from penstock.testing.tiny_families import VOCABULARY, decoder_families, tiny_family

Setting = Literal["fetched", "exact", "full"]
SETTINGS: tuple[Setting, ...] = ("fetched", "exact", "full")
PROMPT_TOKENS, NEW_TOKENS, MAX_TOKENS, PADDING = 52, 4, 64, 21
TOLERANCE = 1e-4
"""Of logits, as a share of the largest."""


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """What became of one family."""

    family: str
    outcome: Literal["works", "refused", "not built", "fails"]
    words: str = ""
    """Of the refusal, or of what went wrong."""
    model: str = ""
    """The class of the model."""
    policies: tuple[str, ...] = ()
    """Those that work, in every setting."""
    life: dict[str, str] = field(default_factory=dict)
    """What became of turns, of going back, of drafts, of a stored document; see `family_life`."""


def sweep(
    families: Iterable[str],
    policies: Iterable[str] = tuple(POLICIES),
    settings: Iterable[Setting] = SETTINGS,
) -> Iterator[FamilyResult]:
    """Run every policy in every setting over each family."""
    for family in families:
        yield sweep_family(family, tuple(policies), tuple(settings))


def sweep_family(
    family: str, policies: tuple[str, ...], settings: tuple[Setting, ...] = SETTINGS, *,
    lives: bool = True,
) -> FamilyResult:  # fmt: skip
    """Run policies over one family; never raises for what the family does.

    Args:
        lives: use a cache in turns, documents and so on too.
    """
    try:
        model = tiny_family(family)
        expected = _generate(model, DynamicCache(config=model.config))
        if not torch.stack(expected.logits).isfinite().all():
            raise ValueError("its logits are not finite")
    except Exception as error:
        try:
            expected = _generate(model, None, use_cache=own_cache_class(model) is None)
        except Exception:
            return FamilyResult(family, "not built", _in_one_line(error))
    name = type(model).__name__
    refusals: set[str] = set()
    worked = []
    for policy in policies:
        for setting in settings:
            before = model.config._attn_implementation
            try:
                wrong = run(model, policy, setting, expected)
            except UnsupportedModelError as refused:
                refusals.add(str(refused))
                wrong = None
            except Exception as error:
                wrong = _in_one_line(error)
            if wrong is None and model.config._attn_implementation != before:
                wrong = "the model's own attention was not put back"
            if wrong is not None:
                return FamilyResult(family, "fails", f"{policy}, {setting}: {wrong}", name)
        worked.append(policy)
    if not refusals:
        try:
            life = family_life(model) if lives else {}
        except Exception as error:
            return FamilyResult(family, "fails", _in_one_line(error), name, tuple(worked))
        return FamilyResult(family, "works", "", name, tuple(worked), life)
    if len(refusals) == 1 and _refuses_at_once(model):
        return FamilyResult(family, "refused", refusals.pop(), name)
    return FamilyResult(family, "fails", f"refused late, or in part: {sorted(refusals)}", name)


def _refuses_at_once(model: PreTrainedModel) -> bool:
    """Whether the refusal comes with the cache, before the first token."""
    try:
        TieredCache(model, "full", store="memory", max_tokens=MAX_TOKENS, batch_size=2).close()
    except UnsupportedModelError:
        return True
    return False


def run(model: PreTrainedModel, policy: str, setting: Setting, expected: Any) -> str | None:
    """Generate with one policy in one setting.

    Args:
        expected: what the plain model generates.

    Returns:
        What is wrong, or None.
    """
    with _cache(model, policy, setting) as cache:
        actual = _generate(model, cache)
        decode = cache.stats.decode
        if setting == "fetched":
            chosen = cache.policy
            fetches = not (chosen.drops or chosen.stays_resident)
            if not torch.stack(actual.logits).isfinite().all():
                return "logits are not finite"
            return "nothing was fetched" if fetches and not decode.read_bytes else None
    if not torch.equal(expected.sequences, actual.sequences):
        return "other tokens than the plain model's"
    plain, mine = torch.stack(expected.logits), torch.stack(actual.logits)
    apart = float((plain - mine).abs().max() / plain.abs().max())
    return None if apart <= TOLERANCE else f"logits are {apart:.1e} from the plain model's"


def _cache(model: PreTrainedModel, policy: str, setting: Setting) -> TieredCache:
    chosen = sized_policy(policy, 10**6 if setting == "full" else 16)
    options: dict[str, Any] = {
        "store": "memory", "max_tokens": MAX_TOKENS, "batch_size": 2, "exact": setting == "exact",
    }  # fmt: skip
    memory: str | int | None = None if setting == "full" else "1/2"
    try:
        return TieredCache(model, chosen, memory, **options)
    except BudgetError as error:
        return TieredCache(model, chosen, error.needed_bytes, **options)


def sized_policy(name: str, selected: int) -> SelectionPolicy:
    """A policy with the sizes of tiny prompts."""
    plain = POLICIES[name]()
    wanted = {"selected_tokens": selected, "window_tokens": 8, "sink_tokens": 4}
    wanted["group_tokens"] = min(8, getattr(plain, "group_tokens", 8))
    known = {field.name for field in fields(plain)}
    return replace(plain, **{key: value for key, value in wanted.items() if key in known})


def _prompt() -> dict[str, Tensor]:
    """Two rows, the second one padded on its left."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (2, PROMPT_TOKENS), generator=draw)
    mask = torch.ones_like(ids)
    ids[1, :PADDING], mask[1, :PADDING] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _generate(model: PreTrainedModel, cache: Any, *, use_cache: bool = True) -> Any:
    given = {} if cache is None else cache_argument(model, cache)
    return model.generate(
        **_prompt(), **given, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
        eos_token_id=None, return_dict_in_generate=True, output_logits=True, use_cache=use_cache,
    )  # fmt: skip


def _in_one_line(error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:160]}"


def main(arguments: list[str] | None = None) -> int:
    """Sweep and write what was found; 1 where a family fails."""
    parser = argparse.ArgumentParser(prog="family_sweep", description=__doc__)
    parser.add_argument(
        "families", nargs="*", metavar="FAMILY",
        help="default: all; of others the results in --json stay",
    )  # fmt: skip
    parser.add_argument("--policy", action="append", choices=tuple(POLICIES), help="default: all")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--table", type=Path, help="where to write them as Markdown")
    args = parser.parse_args(arguments)
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        families, policies = args.families or decoder_families(), args.policy or tuple(POLICIES)
        for result in sweep(families, policies):
            sys.stdout.write(f"{result.family}: {result.outcome} {result.words}\n")
            sys.stdout.flush()
            results.append(result)
    found = {
        "transformers": transformers.__version__, "torch": torch.__version__.split("+")[0],
        "policies": list(policies), "settings": list(SETTINGS),
        "families": [asdict(result) for result in results],
    }  # fmt: skip
    if args.families and args.json is not None and args.json.exists():
        found = _merged(json.loads(args.json.read_text(encoding="utf-8")), found)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.table is not None:
        args.table.write_text(table(found), encoding="utf-8")
    return int(any(result.outcome == "fails" for result in results))


def _merged(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What was found of some families, and what is known of the others."""
    results = {each["family"]: each for each in (*known["families"], *found["families"])}
    return found | {"families": [results[name] for name in sorted(results)]}


def table(found: dict[str, Any]) -> str:
    """The results as a page of Markdown."""
    families = found["families"]
    kinds = {
        kind: [each for each in families if each["outcome"] == kind]
        for kind in ("works", "refused", "not built", "fails")
    }
    intro = (
        f"transformers {found['transformers']} has {len(families)} families with a causal language "
        "model. A small random model of each was run with every policy in float32: at a budget "
        "where something is fetched, exact, and at the full budget. Its prompt has two rows, one "
        "of them padded. Exact and full give the plain model's tokens, and its logits to a "
        f"relative {TOLERANCE:g}. `make sweep` writes this page."
    )
    lived = [each for each in kinds["works"] if each.get("life")]
    used = (
        f"Of {len(lived)} families that work a cache was used as its users do: a padded batch of "
        "three in chunks, a second turn, `crop`, prompt lookup, a reopened document. All gave the "
        "plain model's tokens and logits, or were refused. These refuse something:"
    )
    bounded = [each for each in lived if set(each["life"].values()) != {"right"}]
    lines = [
        "# Model families", "", intro, "",
        "| outcome | families |", "| --- | ---: |",
        *(f"| {kind} | {len(each)} |" for kind, each in kinds.items()),
        "", f"## Works, with all {len(found['policies'])} policies", "",
        ", ".join(f"`{each['family']}`" for each in kinds["works"]) + ".", "",
        "## Refused by `UnsupportedModelError`", "", "| family | words |", "| --- | --- |",
        *(f"| `{each['family']}` | {_cell(each['words'])} |" for each in kinds["refused"]),
        "", "## Turns, going back, drafts, documents", "",
        used, "",
        "| family | turns | crop | lookup | document |", "| --- | --- | --- | --- | --- |",
        *(
            f"| `{e['family']}` | " + " | ".join(e["life"].get(k, "") for k in LIFE) + " |"
            for e in bounded
        ),
        "", "## Not built", "",
        "The plain model itself could not be made small, or could not generate.", "",
        "| family | why |", "| --- | --- |",
        *(f"| `{each['family']}` | {_cell(each['words'])} |" for each in kinds["not built"]), "",
    ]  # fmt: skip
    if kinds["fails"]:
        lines += ["## Fails", "", *(f"* `{e['family']}`: {e['words']}" for e in kinds["fails"]), ""]
    return "\n".join(lines)


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
