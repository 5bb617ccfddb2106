"""Tasks whose answer is spread over the whole document: counting, frequent words, sums, lengths.

What decoding must attend to, and what models of the bundled size have learnt of it. "Seen" is of
training runs of up to 0.69 G tokens in which few questions of these kinds were asked; what is
not marked so is a reason and no result:

* `most_frequent` reads off the average of all tokens, so that no small selection of keys is
  enough. One word comes at least three times as often as any other of 6 to 16: it has 0.16 of
  the mass at least, and each other about a quarter of its own. Seen when it was twice as often as
  any of 8 to 20 others: 30 to 74 % right, and the wrong answers mostly words that are not in the
  document, what the average of many values looks most like; the second most frequent hardly ever.
* `frequent_words` is the same for three words, each about half as often again as the next. Seen:
  not learnt (0 to 2 % whole answers), the first word often wrong too. The recall-7m recipe
  had a task of this kind (its documents are not known) and learnt the first word alone: the second
  and third drown in a sum of many value vectors.
* `count_words` needs every occurrence of the word just said, and none else. Softmax attention
  counts by how much of its mass `<bos>` loses: 1 / (1 + n) is 0.50, 0.33, 0.25, 0.20 for one to
  four. Seen with counts up to nine, whose last steps are a hundredth apart: a ninth of the digits
  right, which is chance, to a third, which was in the run that found single words. Hence four.
* `flagged_sum` says its running total, so that each step is a retrieval (the next flagged key, as
  in multi_value) and one addition of a digit to a number of two digits, a table of 900 entries.
  Seen: up to 96 % of the tokens, up to 6 % whole answers. The sum in one step would be a
  product of a count and an average, which is not learnt exactly.
* `longest_list` compares lengths that the tokens closing the lists can know from reading; the
  answer picks the largest; decoding attends to little. Seen with a longest list that was longer
  by a third: 2 to 42 % right; twice as long as any other: 14 to 75; three times, as now: 96 to 100.
"""

import random
from dataclasses import replace
from itertools import accumulate

from penstock.core.errors import ConfigError
from penstock.evaluate.tasks.documents import Document, count_tokens, essay, hide
from penstock.evaluate.tasks.sample import Sample
from penstock.evaluate.tasks.words import Words

_WORDS_PREFACE = (
    "Memorize the words in the following text . "
    "There is a quiz about the most frequent words later ."
)
_COUNT_PREFACE = (
    "Memorize the words in the following text . There is a quiz about their numbers later ."
)
_LISTS_PREFACE = (
    "Memorize each list hidden in the following text . There is a quiz about it later ."
)
_VALUES_PREFACE = "Memorize the values below . The special values have a ! ."

_MOST_PREFACE = (
    "Memorize the words in the following text . "
    "There is a quiz about the most frequent word later ."
)

_MOST_OTHERS = (6, 16)
_MOST_SHARE = (0.15, 1 / 3)
_FEWEST_OF_MOST = 6

_TOP = 3
_TOP_RATIO = 1.5
_OTHER_WORDS = (12, 40)
_OTHERS_SHARE = (0.2, 0.5)
_SENTENCE_WORDS = 11
_FEWEST_OF_THIRD = 4

_ASKED_COUNTS = 4
_OTHER_COUNTS = 4
_LARGEST_COUNT = 4

_LISTS = (3, 8)
_SHORTEST_LIST = 3
_LONGEST_LIST = 120
_LENGTH_RATIO = 3

_FLAGGED = (3, 10)
_ITEM_TOKENS = 5


def most_frequent(tokens: int, rng: random.Random, words: Words) -> Sample:
    """A document of a few words; the one that comes at least three times as often as any other."""
    question = (
        "Question : What is the most frequent word in the text ? "
        "Answer : The most frequent word in the text is"
    )
    document = Document(tokens, _MOST_PREFACE, question, 0)
    room = document.room - -(-document.room // (_SENTENCE_WORDS + 1))
    others = rng.randint(*_MOST_OTHERS)
    shares = [rng.uniform(*_MOST_SHARE) for _ in range(others)]
    most = room / (1 + sum(shares))
    if most < _FEWEST_OF_MOST:
        raise ConfigError(f"{room} words are too short for this task: none would stand out")
    counts = [max(1, int(share * most)) for share in shares]
    counts.insert(0, room - sum(counts))
    pool = rng.sample(words.filler, 1 + others)
    body = _shuffled(pool, counts, rng)
    return _sample("most_frequent", document.finish(body), f"{pool[0]} .", (pool[0],))


def frequent_words(tokens: int, rng: random.Random, words: Words) -> Sample:
    """A document of a few dozen words; the three most frequent are asked for, in order."""
    question = (
        "Question : What are the three most frequent words in the text ? "
        "Answer : The three most frequent words in the text are"
    )
    document = Document(tokens, _WORDS_PREFACE, question, 0)
    room = document.room - -(-document.room // (_SENTENCE_WORDS + 1))
    others = min(rng.randint(*_OTHER_WORDS), max(1, room // 12))
    pool = rng.sample(words.filler, _TOP + others)
    counts = _counts(room, others, rng)
    body = _shuffled(pool, counts, rng)
    answer = " ".join(pool[:_TOP])
    return _sample("frequent_words", document.finish(body), f"{answer} .", tuple(pool[:_TOP]))


def count_words(tokens: int, rng: random.Random, words: Words) -> Sample:
    """Words that come one to four times in random sentences; how often each of four comes."""
    counted = rng.sample(words.nouns, _ASKED_COUNTS + _OTHER_COUNTS)
    most = max(1, min(_LARGEST_COUNT, tokens // 100))
    counts = [rng.randint(1, most) for _ in counted]
    mentions = [
        f"Here is the {word} ."
        for word, count in zip(counted, counts, strict=True)
        for _ in range(count)
    ]
    rng.shuffle(mentions)
    asked = list(zip(counted, counts, strict=True))[:_ASKED_COUNTS]
    question = (
        f"Question : What are the numbers of {' , '.join(word for word, _ in asked)} "
        "in the text ? Answer :"
    )
    document = Document(tokens, _COUNT_PREFACE, question, sum(map(count_tokens, mentions)))
    hidden = set(counted)
    rest = replace(words, filler=tuple(word for word in words.filler if word not in hidden))
    prompt = document.finish(hide(mentions, essay(document.room, rest, rng), rng))
    parts = tuple(f"{word} is {count}" for word, count in asked)
    return _sample("count_words", prompt, " , ".join(parts) + " .", parts)


def flagged_sum(tokens: int, rng: random.Random, words: Words) -> Sample:
    """A document of keys with digits; the flagged ones in order, with the running total."""
    question = "Question : Find all special values and add them . Answer :"
    document = Document(tokens, _VALUES_PREFACE, question, 0)
    items = document.room // _ITEM_TOKENS
    flagged = min(rng.randint(*_FLAGGED), items // 2)
    if flagged < 2:
        raise ConfigError(f"tokens={tokens} is too short for this task: two values must fit in")
    keys = words.key_pool(rng, items)
    digits = [rng.randint(1, 9) for _ in keys]
    special = sorted(rng.sample(range(items), flagged))
    marks = [":"] * items
    for at in special:
        marks[at] = "!"
    body = [f"{key} {m} {d} ;" for key, m, d in zip(keys, marks, digits, strict=True)]
    totals = accumulate(digits[at] for at in special)
    parts = tuple(
        f"{keys[at]} {digits[at]} = {total // 10} {total % 10}"
        for at, total in zip(special, totals, strict=True)
    )
    return _sample("flagged_sum", document.finish(body), " ; ".join(parts) + " .", parts)


def longest_list(tokens: int, rng: random.Random, words: Words) -> Sample:
    """Named lists hidden in random sentences; the name of the longest is asked for."""
    question = "Question : Which list has the most words ? Answer : The list for"
    spare = Document(tokens, _LISTS_PREFACE, question, 0).room
    frame, least = count_tokens(_list_sentence("a b", [])), _LENGTH_RATIO * _SHORTEST_LIST
    count = min(rng.randint(*_LISTS), spare // (2 * (frame + least)))
    if count < 2:
        raise ConfigError(f"tokens={tokens} is too short for this task: two lists must fit in")
    longest = rng.randint(least, min(_LONGEST_LIST, spare // (2 * count) - frame))
    second = longest // _LENGTH_RATIO
    lengths = [longest, *(rng.randint(_SHORTEST_LIST, second) for _ in range(count - 1))]
    keys = words.key_pool(rng, count)
    lists = [
        _list_sentence(key, rng.choices(words.filler, k=length))
        for key, length in zip(keys, lengths, strict=True)
    ]
    rng.shuffle(lists)
    document = Document(tokens, _LISTS_PREFACE, question, sum(map(count_tokens, lists)))
    prompt = document.finish(hide(lists, essay(document.room, words, rng), rng))
    return _sample("longest_list", prompt, f"{keys[0]} .", (keys[0],))


def _counts(room: int, others: int, rng: random.Random) -> list[int]:
    """How often each word comes, the three most frequent first; they add up to `room`.

    Raises:
        ConfigError: the third would come too rarely to stand out.
    """
    shares = [_TOP_RATIO**rank for rank in range(_TOP - 1, -1, -1)]
    shares += [rng.uniform(*_OTHERS_SHARE) for _ in range(others)]
    third = room / sum(shares)
    if third < _FEWEST_OF_THIRD:
        raise ConfigError(f"{room} words are too short for this task: none would stand out")
    counts = [max(1, int(share * third)) for share in shares]
    counts[0] += room - sum(counts)  # what rounding left over
    return counts


def _shuffled(pool: list[str], counts: list[int], rng: random.Random) -> list[str]:
    """Sentences of words in random order, each as often as its count."""
    drawn = [word for word, count in zip(pool, counts, strict=True) for _ in range(count)]
    rng.shuffle(drawn)
    starts = range(0, len(drawn), _SENTENCE_WORDS)
    return [" ".join([*drawn[at : at + _SENTENCE_WORDS], "."]) for at in starts]


def _list_sentence(key: str, listed: list[str]) -> str:
    return " ".join(["The list for", key, "is (", *listed, ") ."])


def _sample(task: str, prompt: str, answer: str, values: tuple[str, ...]) -> Sample:
    """A sample whose answer is followed by `<eos>`."""
    return Sample(task, prompt, answer, count_tokens(answer) + 1, values)
