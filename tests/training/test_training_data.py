"""Rows and batches: deterministic, of the bench's making, and never an evaluation's sample."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import training
from penstock.core.errors import ConfigError
from penstock.evaluate.tasks import GeneratedTasks, Words, make_sample
from training.checkpoint import read_vocabulary
from training.data import EOS, GENERATORS, OTHER, PAD, RowMaker
from training.dense import DENSE
from training.examine import draw_sample
from training.questions import SEVERAL, further_questions
from training.settings import Settings, read_settings
from training.workers import BatchStream, WorkerError

CONFIGS = Path(training.__file__).parent / "configs"
VOCABULARY = read_vocabulary()
WORDS = Words.of(VOCABULARY)
NAMES = {number: word for word, number in VOCABULARY.items()}


def toy() -> Settings:
    return read_settings(CONFIGS / "toy.toml")


def all_tasks() -> Settings:
    tasks = [*GENERATORS, *DENSE]
    return replace(toy(), mix=dict.fromkeys(tasks, 1 / len(tasks)))


def text_of(tokens: np.ndarray) -> str:
    return " ".join(NAMES[int(number)] for number in tokens if number != PAD)


def test_same_number_same_batch_other_number_another() -> None:
    first, again = (RowMaker(all_tasks(), VOCABULARY).batch(3) for _ in range(2))
    other = RowMaker(all_tasks(), VOCABULARY).batch(4)
    for field in ("tokens", "positions", "places", "targets", "weights", "groups"):
        assert np.array_equal(getattr(first, field), getattr(again, field)), field
    assert not np.array_equal(first.tokens, other.tokens)
    seeded = RowMaker(replace(all_tasks(), seed=1), VOCABULARY).batch(3)
    assert not np.array_equal(first.tokens, seeded.tokens)


@pytest.mark.parametrize("task", [*GENERATORS, *DENSE])
@pytest.mark.parametrize("length", [544, 2176])
def test_rows_are_full_and_their_answers_end(task: str, length: int) -> None:
    settings = replace(toy(), mix={task: 1.0})
    maker = RowMaker(settings, VOCABULARY)
    for seed in range(4):
        row = maker.row(length, f"x/{seed}")
        assert row.tokens.shape == row.positions.shape == row.weights.shape == (length,)
        padding = int((row.tokens == PAD).sum())
        assert padding < length // 5, "little is wasted"
        assert (row.tokens[length - padding :] == PAD).all()
        assert not row.is_answer[row.tokens == PAD].any()
        assert not row.weights[row.tokens == PAD].any()
        assert row.is_answer[row.tokens == EOS].all()
        said = int(row.is_answer.sum())
        wanted = min(96, max(24, said))
        assert float(row.weights[row.is_answer].sum()) == pytest.approx(wanted, rel=1e-3)
        assert (np.diff(row.positions) >= 1).all()
        assert row.positions[0] == 0
        assert row.positions[-1] < settings.model.positions


def test_a_row_is_a_sample_of_the_bench_and_its_answer() -> None:
    settings = replace(toy(), mix={"copy": 1.0})
    row = RowMaker(settings, VOCABULARY).row(544, "y")
    text = text_of(row.tokens)
    assert text.startswith("<bos> Memorize the list hidden")
    answer = text_of(row.tokens[row.is_answer])
    assert f"( {answer.removesuffix(' <eos>')}" in text.split(" Question : ")[0]


def test_what_a_walk_says_of_its_state_weighs_as_it_is_told() -> None:
    once = replace(toy(), mix={"long_walk": 1.0})
    often = replace(once, rows=replace(once.rows, state_weight=4.0))
    plain, row = (RowMaker(one, VOCABULARY).row(1088, "w") for one in (once, often))
    assert np.array_equal(plain.tokens, row.tokens)
    times = (row.weights / np.where(plain.weights > 0, plain.weights, 1))[row.is_answer]
    said = [NAMES[token] for token in row.tokens[row.is_answer]]
    state = {at for at, word in enumerate(said) if "=" in said[max(0, at - 2) : at]}
    assert {at for at, one in enumerate(times) if one == pytest.approx(4.0)} == state
    assert said[-2] == "."
    assert len(said) - 2 in state, "where it ends counts"
    assert np.array_equal(plain.weights[~row.is_answer], row.weights[~row.is_answer])


@pytest.mark.parametrize("task", sorted(SEVERAL))
def test_further_questions_are_other_questions_with_their_own_answers(task: str) -> None:
    sample = GENERATORS[task](1200, random.Random(5), WORDS)
    asked = list(further_questions(sample, random.Random(1)))
    own = "Question : " + sample.prompt.rsplit(" Question : ", 1)[1]
    assert asked
    assert own not in [question for question, _ in asked]
    assert len({question for question, _ in asked}) == len(asked)
    for question, answer in asked:
        same_words = set(question.split()) - set(own.split())
        assert all(word in sample.prompt.split() for word in same_words)
        assert answer.endswith(" .")
        assert set(answer.split()) <= {*sample.prompt.split(), *"123456789"}


def test_further_answers_follow_from_the_document() -> None:
    sample = make_sample("multi_key_full", 900, random.Random(3), WORDS)
    for question, answer in further_questions(sample, random.Random(0)):
        told = question.split(" Answer : ")[1]
        assert f"{told} {answer}" in sample.prompt
    sample = make_sample("variable_tracking", 900, random.Random(3), WORDS)
    for question, answer in further_questions(sample, random.Random(0)):
        value = question.split("the value ")[1].split(" .")[0]
        source = value
        for name in answer.removesuffix(" .").split():
            assert f"VAR {name} = {source} ." in sample.prompt
            source = f"VAR {name}"


def test_replay_asks_much_and_single_needles_once() -> None:
    several = RowMaker(replace(toy(), mix={"dense_replay": 1.0}), VOCABULARY).row(1088, "z")
    once = RowMaker(replace(toy(), mix={"single_noise": 1.0}), VOCABULARY).row(1088, "z")
    assert (several.tokens == EOS).sum() > 10
    assert (once.tokens == EOS).sum() == 1


def test_a_stage_may_have_its_own_mix(tmp_path: Path) -> None:
    text = (CONFIGS / "toy.toml").read_text()
    path = tmp_path / "own.toml"
    path.write_text(text.replace("steps = 20", "steps = 20\nmix = { copy = 1.0 }", 1))
    settings = read_settings(path)
    assert settings.groups == [*settings.mix, "copy"]
    assert settings.mix_at(19) == {"copy": 1.0}
    assert settings.mix_at(20) == settings.mix
    maker = RowMaker(settings, VOCABULARY)
    last_of_first, first_of_second = (maker.batch(2 * step) for step in (19, 20))
    assert set(last_of_first.groups) == {OTHER, len(settings.mix)}
    assert len(settings.mix) not in first_of_second.groups
    other = RowMaker(toy(), VOCABULARY)
    assert np.array_equal(first_of_second.tokens, other.batch(40).tokens)
    stages = (replace(settings.stages[0], mix={"riddle": 1.0}),)
    unknown = replace(settings, stages=stages)
    with pytest.raises(ConfigError, match="riddle"):
        RowMaker(unknown, VOCABULARY)


def test_batch_guesses_the_token_behind_its_place() -> None:
    batch = RowMaker(all_tasks(), VOCABULARY).batch(25)
    rows, length = batch.tokens.shape
    assert rows == 2048 // length
    flat = batch.tokens.reshape(-1)
    assert np.array_equal(flat[batch.places + 1], batch.targets)
    assert (batch.weights > 0).all()
    assert set(batch.groups) <= {OTHER, *range(len(GENERATORS) + len(DENSE))}
    assert ((batch.weights < 0.031) == (batch.groups == OTHER)).all()
    assert ((batch.places + 1) % length != 0).all()


def test_positions_jump_inside_the_document_only() -> None:
    settings = replace(toy(), rows=replace(toy().rows, jump_share=1.0, jump_below=600))
    maker = RowMaker(settings, VOCABULARY)
    rows = [maker.row(256, f"p/{number}") for number in range(20)]
    assert all(row.positions[-1] > 255 for row in rows)
    for row in rows:
        question = list(row.tokens).index(VOCABULARY["Question"])
        assert (np.diff(row.positions[question:]) == 1).all()
    assert np.array_equal(maker.row(600, "p").positions, np.arange(600))


def test_training_never_sees_an_evaluation_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[str] = []

    class Watched(random.Random):
        def __init__(self, seed: str) -> None:
            seeds.append(seed)
            super().__init__(seed)

    monkeypatch.setattr("training.data.random.Random", Watched)
    RowMaker(all_tasks(), VOCABULARY).batch(0)
    drawn = set(seeds)
    assert drawn
    assert all(seed.startswith(("train/", "sample/")) for seed in drawn)
    seeds.clear()
    draw_sample("copy", 0, tokens=300, seed=0, words=WORDS)
    assert seeds == ["0/copy/300/0"]


def test_examined_samples_are_those_of_the_bench(bundled: GeneratedTasks) -> None:
    (theirs,) = bundled.draw("multi_value", 3, 1, tokens=400, seed=9)
    assert draw_sample("multi_value", 3, tokens=400, seed=9, words=WORDS) == theirs


@pytest.fixture
def bundled() -> GeneratedTasks:
    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return VOCABULARY

    return GeneratedTasks(Tokenizer())  # type: ignore[arg-type]


def test_processes_make_the_same_batches_in_the_same_order() -> None:
    settings = toy()
    with BatchStream(settings, VOCABULARY, first=1, last=5, workers=0) as stream:
        here = [batch.tokens for batch in stream]
    with BatchStream(settings, VOCABULARY, first=1, last=5, workers=2) as stream:
        there = [batch.tokens for batch in stream]
    assert len(here) == 4
    assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))


def test_a_failing_process_is_reported() -> None:
    stages = (replace(toy().stages[0], lengths=(16,)),)  # no task fits
    settings = replace(toy(), stages=stages)
    with (
        BatchStream(settings, VOCABULARY, first=0, last=2, workers=1) as stream,
        pytest.raises(WorkerError, match="too short"),
    ):
        list(stream)


def test_a_killed_process_is_reported() -> None:
    with BatchStream(toy(), VOCABULARY, first=0, last=40, workers=1) as stream:
        for process in stream._processes:
            process.kill()
            process.join()
        with pytest.raises(WorkerError, match="died"):
            list(stream)


def test_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"riddle.*dense_replay"):
        RowMaker(replace(toy(), mix={"riddle": 1.0}), VOCABULARY)


@pytest.mark.parametrize(
    "name",
    [
        "recall-7m",
        "recall-2",
        "recall-2-last",
        "toy",
    ],
)
def test_settings_are_whole(name: str) -> None:
    settings = read_settings(CONFIGS / f"{name}.toml")
    assert settings.name == name
    RowMaker(settings, VOCABULARY)
    assert settings.rate_at(0) < settings.rate_at(settings.optimizer.warmup_steps)
    assert settings.rate_at(settings.steps - 1) < 0.2
    whole = settings.steps - settings.optimizer.decay_steps
    assert settings.optimizer.warmup_steps <= whole
    assert settings.rate_at(whole - 1) == 1.0 > settings.rate_at(whole + 1)
    half = settings.rate_at(settings.steps - settings.optimizer.decay_steps // 2)
    assert half == pytest.approx(0.5**settings.optimizer.decay_power, rel=0.1)
    doubled = settings.scaled(2)
    assert doubled.steps == 2 * settings.steps
    assert doubled.optimizer.decay_steps == 2 * settings.optimizer.decay_steps


def test_recall_2_rows_hold_the_longest_prompts_with_their_answers() -> None:
    longest = max(max(stage.lengths) for stage in read_settings(CONFIGS / "recall-2.toml").stages)
    sample = make_sample("pointer_chasing", 32768, random.Random(0), WORDS)
    assert 32768 + sample.max_new_tokens <= longest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed = 0", "seeds = 0", "no setting 'seeds'"),
        ("layers = 2\n", "", "lacks the setting 'layers'"),
        ("multi_value = 0.2", "multi_value = 0.4", "add up to 1.2"),
        ("lengths = [256, 512]", "lengths = [256, 8192]", "8192 tokens are longer"),
        ('attention = "auto"', 'attention = "fast"', "auto, cudnn, flash"),
        ("steps = 20", "steps = 0", "at least one step"),
        ("steps = 20", "steps = 20\nmix = { copy = 0.9 }", "mix of stage 1 add up to 0.9"),
        ("steps = 20", "steps = 20\nmix = 1", "mix of stage 1 must be a table"),
        ("multi_value = 0.2", "multi_value = -0.2", "must not be below 0"),
        ("seed = 0", "seed = ", "cannot read"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (CONFIGS / "toy.toml").read_text()
    assert old in text
    path = tmp_path / "bad.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        read_settings(path)
