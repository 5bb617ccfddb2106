"""Parts of a prose model's card: where its text is from, its recipe, perplexity."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.evaluate.result import Result
from training.corpus import FILES, read_documents
from training.perplexity import tables

Record = Mapping[str, Any]


def data(corpus: Path | None) -> str:
    """The corpus's sources and licences, counted from its own files.

    Args:
        corpus: folder with `FILES`; None: it is not at hand.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """
    if corpus is None:
        return "The corpus was not at hand when this card was written."
    documents: Counter[tuple[str, str]] = Counter()
    words: Counter[tuple[str, str]] = Counter()
    titles: dict[tuple[str, str], list[str]] = {}
    for name in FILES:
        for document in read_documents(corpus / name):
            key = origin(document.source), document.licence
            documents[key] += 1
            words[key] += len(document.text.split())
            if document.title:
                titles.setdefault(key, []).append(f"{document.title}, {document.author}")
    lines = [
        (
            f"{sum(documents.values()):,} documents, {sum(words.values()):,} words, from the "
            "sources below, changed by the corpus's cleaning. The texts belong to their authors; "
            "none of them endorses this model."
        ),
        "",
        "| source | licence | documents | words | what |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for key in sorted(documents):
        what = titles[key][0] if documents[key] == 1 and key in titles else ""
        lines.append(f"| {key[0]} | {key[1]} | {documents[key]:,} | {words[key]:,} | {what} |")
    return "\n".join(lines)


def origin(source: str) -> str:
    """The repository and commit of a document's source, without its path."""
    place = source.rsplit(" via ", 1)[-1]
    before, at, behind = place.partition("@")
    return f"{before}{at}{behind.split(':', 1)[0]}"


def recipe(settings: Record) -> list[str]:
    """What a prose run has besides what all have."""
    corpus, rows = settings["corpus"], settings["rows"]
    shares = ", ".join(f"{stage['recall']:.2f}" for stage in settings["stages"])
    return [
        (
            f"Tokenizer: byte-level BPE of {corpus['vocabulary']:,}, digits one by one, trained on "
            f"{corpus['sample_mb']:g} M characters spread over the corpus; "
            f"{corpus['held_back']} documents only looked at during the run."
        ),
        (
            f"Rows that ask about real prose, by stage: {shares}; the others are plain prose, a "
            "loss of weight 1 on every token."
        ),
        (
            f"In rows that ask: answers have {rows['answer_share']:.0%} of a micro-batch's whole "
            f"weight (at most {rows['answer_most']:g} a token), real prose "
            f"{rows['document_weight']:g} a token, facts and questions {rows['other_weight']:g}; "
            f"{rows['other_wordings']:.0%} of the needles are in other wordings than the bench's; "
            f"{rows['jump_share']:.0%} of the rows below {rows['jump_below']:,} tokens have up to "
            f"{rows['jumps']} jumps in their positions."
        ),
    ]


def perplexity(evaluation: Result | None) -> str:
    """Both tables of an evaluation's perplexity."""
    if evaluation is None or "perplexity" not in evaluation.figures:
        return "Not measured."
    figures = evaluation.figures["perplexity"]
    positions, contexts = tables(figures)
    return (
        f"Held-out documents, never trained on: {figures['windows']} windows of "
        f"{figures['window']:,} tokens from {figures['documents']} documents that are long enough, "
        "the same windows in all rows; +- is the standard error over windows.\n\n"
        f"```\n{positions}\n```\n\n"
        "Other positions hold other text. The same text with less and more in front of it: the "
        f"last {figures['tail']} tokens of every window, `<bos>` counted in with what is in front; "
        "the last column is the difference to the last row, window by window.\n\n"
        f"```\n{contexts}\n```"
    )


def held_back(glances: list[Record]) -> str:
    """Loss on held-back text at each glance, by length of the row."""
    seen = [record for record in glances if record.get("held_back")]
    if not seen:
        return ""
    lengths = list(dict.fromkeys(length for record in seen for length in record["held_back"]))
    lines = [
        "Loss during training on documents that were held back, nats a token, by row length:",
        "",
        f"| step | {' | '.join(f'{int(length):,}' for length in lengths)} |",
        "| ---: " * (len(lengths) + 1) + "|",
    ]
    for record in seen:
        shown = [record["held_back"].get(length) for length in lengths]
        cells = " | ".join("-" if loss is None else f"{loss:.3f}" for loss in shown)
        lines.append(f"| {record['step']:,} | {cells} |")
    return "\n".join(lines)
