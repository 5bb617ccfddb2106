"""Reopening: a document's first token against prefill, its answers against those of a new cache."""

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.documents.document import Document
from penstock.documents.settings import DocumentSettings
from penstock.evaluate.tasks import Sample
from penstock.evaluate.tasks.recall import make_sample
from penstock.generation.engine import LLM
from penstock.generation.prompts import PromptBatch
from penstock.generation.sampling import SamplingParams
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel
from penstock.storage.documents import size_bytes

_LEAD = "Question : "
TASK = "multi_query"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured for one length."""

    loaded: LoadedModel
    tokens: int
    questions: int
    answer_tokens: int
    memory: str
    chunk: int
    rounds: int
    folder: Path
    seed: int


def measure(case: Case) -> dict[str, Any]:
    """Store a document, reopen it again and again, and ask a new cache of the same policy too.

    The cache that is compared prefills the document in the same chunks, then each question behind
    it, cut back to the document in between.
    """
    samples = _samples(case)
    text = samples[0].prompt.rpartition(_LEAD)[0]
    questions = [_LEAD + sample.prompt.rpartition(_LEAD)[2] for sample in samples]
    settings = DocumentSettings(prefill_chunk_size=case.chunk)
    times: list[float] = []
    start = time.perf_counter()
    with Document.create(
        case.loaded, text, case.folder, memory=case.memory, settings=settings,
        on_tokens=lambda done, total: times.append(time.perf_counter()),
    ) as document:  # fmt: skip
        row: dict[str, Any] = {
            "tokens": document.about.tokens, "create_prefill_s": times[-1] - start,
            "store_s": time.perf_counter() - times[-1], "written_bytes": document.written_bytes,
            "group_tokens": document.about.group_tokens, "policy": document.policy.name,
        }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=case.answer_tokens)
    row |= {"opens": [_reopen(case, questions[0], params) for _ in range(case.rounds)]}
    row |= _many(case, questions, params)
    fresh = _fresh(case, text, questions, params)
    row["fresh_first_token_s"] = fresh["first_token_s"]
    row["fresh_prefill_s"] = fresh["prefill_s"]
    row["same_answers"] = sum(a == b for a, b in zip(row["answers"], fresh["answers"], strict=True))
    row["right_answers"] = sum(
        " ".join(a.split()) == " ".join(sample.answer.split())
        for a, sample in zip(row.pop("texts"), samples, strict=True)
    )
    row["questions"] = len(questions)
    del row["answers"]
    return row


def _samples(case: Case) -> list[Sample]:
    """Samples over one document: the same text, other facts asked for."""
    assert case.loaded.tokenizer is not None
    vocabulary = case.loaded.tokenizer.get_vocab()
    first = make_sample(TASK, case.tokens, random.Random(case.seed), vocabulary)
    return [first, *_other_questions(first, case.questions - 1, random.Random(case.seed + 1))]


def _other_questions(first: Sample, count: int, draw: random.Random) -> list[Sample]:
    """The same facts asked for in other orders and numbers."""
    head, _, question = first.prompt.rpartition(_LEAD)
    words = question.split()
    begin, end = words.index("for") + 1, words.index("?")
    things = [each.strip() for each in " ".join(words[begin:end]).split(",")]
    parts = [each.strip() for each in first.answer.removesuffix(" .").split(",")]
    known = dict(zip(things, parts, strict=True))
    out = []
    for _ in range(count):
        asked = draw.sample(things, draw.randint(1, len(things)))
        said = f"{' '.join(words[:begin])} {' , '.join(asked)} {' '.join(words[end:])}"
        answer = f"{' , '.join(known[thing] for thing in asked)} ."
        out.append(replace(first, prompt=head + _LEAD + said, answer=answer))
    return out


def _reopen(case: Case, question: str, params: SamplingParams) -> dict[str, float]:
    """Open the stored document and ask; seconds from before it is opened."""
    told: list[float] = []
    start = time.perf_counter()
    with Document.open(
        case.loaded, case.folder, settings=DocumentSettings(prefill_chunk_size=case.chunk)
    ) as document:
        opened = time.perf_counter()
        [output] = document.ask(
            question, params, on_text=lambda number, piece: told.append(time.perf_counter())
        )
        decode = output.stats.decode
        return {
            "open_s": opened - start, "first_token_s": told[0] - start,
            "opened_bytes": document.opened_bytes,
            "prefill_read_bytes": output.stats.prefill.read_bytes,
            "decode_tokens_per_s": output.run.decode_tokens_per_s,
            "decode_read_bytes_per_token": decode.read_bytes_per_token,
            "ledger_bytes": output.memory.peak_bytes,
        }  # fmt: skip


def _many(case: Case, questions: list[str], params: SamplingParams) -> dict[str, Any]:
    """All questions in one process: what they took, and what grew."""
    before = size_bytes(case.folder)
    start = time.perf_counter()
    with Document.open(
        case.loaded, case.folder, settings=DocumentSettings(prefill_chunk_size=case.chunk)
    ) as document:
        outputs = document.ask(questions, params)
    return {
        "questions_s": time.perf_counter() - start,
        "prefilled_tokens": sum(output.stats.prefill.tokens for output in outputs),
        "restored_tokens": sum(output.run.restored_tokens for output in outputs),
        "cache_written_bytes": sum(
            output.stats.prefill.written_bytes + output.stats.decode.written_bytes
            for output in outputs
        ),
        "grown_bytes": size_bytes(case.folder) - before,
        "answers": [output.token_ids for output in outputs],
        "texts": [output.text for output in outputs],
    }


def _fresh(case: Case, text: str, questions: list[str], params: SamplingParams) -> dict[str, Any]:
    """A new cache of the document's policy and budget: prefill, and the same questions."""
    loaded, model = case.loaded, case.loaded.model
    tokenizer: Any = loaded.tokenizer
    ids = tokenizer(text, verbose=False)["input_ids"]
    asked = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in questions]
    with Document.open(loaded, case.folder) as document:
        policy = document.policy
    most = len(ids) + max(map(len, asked)) + case.answer_tokens
    llm = LLM(loaded, prefill_chunk_size=case.chunk)
    answers = []
    told: list[float] = []
    with TieredCache(
        model, policy, case.memory, max_tokens=most, must_tier=True, prompt_tokens=len(ids)
    ) as cache:
        start = time.perf_counter()
        forward: Any = model
        for begin in range(0, len(ids), case.chunk):
            part = torch.tensor([ids[begin : begin + case.chunk]])
            with torch.no_grad():
                forward(part, **cache_argument(forward, cache), use_cache=True, logits_to_keep=1)
        prefilled = time.perf_counter()
        for each in asked:
            whole = [*ids, *each]
            batch = PromptBatch(
                texts=[None], token_ids=[whole], input_ids=torch.tensor([whole]),
                attention_mask=torch.ones(1, len(whole), dtype=torch.int64),
            )  # fmt: skip
            [output] = llm.answer(
                batch, params, cache, on_text=lambda row, piece: told.append(time.perf_counter())
            )
            answers.append(output.token_ids)
            cache.crop(len(ids))
    return {
        "prefill_s": prefilled - start, "first_token_s": told[0] - start, "answers": answers
    }  # fmt: skip
