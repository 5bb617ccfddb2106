"""Video runs at toy size: clips and their questions, rows, the forward pass, training, answers."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

import training
from penstock.core.errors import ConfigError
from penstock.evaluate.accuracy_settings import parse_setting, parse_settings
from training import evaluate_video, model_card, train
from training.clips import TASKS, Cast, Clip, Event, Examiner, draw_clip, pixel_table
from training.prefilled_clips import load_reader
from training.run_settings import read_run_settings
from training.video_data import Grid, VideoRowMaker, clip_ids, video_positions
from training.video_model import build, grids_of, on_axes, patch_table
from training.video_questions import draw_prompt
from training.video_settings import VideoSettings
from training.video_words import VIDEO, vocabulary, write_processor

CONFIGS = Path(training.__file__).parent / "configs"
WORDS = vocabulary()
CAST = Cast(colours=4, shapes=6)
CLIP = Clip(
    np.zeros((9, 4), dtype=np.uint16), 100,
    (Event(101, 0, 1), Event(103, 2, 3), Event(104, 0, 1), Event(106, 1, 1), Event(108, 3, 5)),
)  # fmt: skip


def toy() -> VideoSettings:
    settings = read_run_settings(CONFIGS / "video-toy.toml")
    assert isinstance(settings, VideoSettings)
    return settings


def test_questions_say_what_happened() -> None:
    examiner = Examiner(CLIP, CAST, random.Random(0))
    said: dict[str, str] = {}
    while asked := examiner.ask(dict.fromkeys(TASKS, 1.0)):
        said[asked.question] = asked.answer
        assert {*asked.question.split(), *asked.answer.split()} <= set(WORDS)
    assert said["What appeared at 1 0 3 ?"] == "blue triangle"
    assert said["When did the green ring appear ?"] == "1 0 6"
    assert "When did the red ring appear ?" not in said  # it came twice
    assert said["How often did the red ring appear ?"] == "1 0 1 , 1 0 4 : 2"
    assert said["In which order came the colours of the ring ?"] == "red , red , green"
    assert said["What came after the blue triangle ?"] == "red ring , green ring , yellow heart"
    assert len(said) == 5 + 3 + 4 + 1 + 2


def test_what_is_asked_by_default_can_be_read() -> None:
    read = [each.text for each in parse_settings([evaluate_video.SETTINGS])]
    assert ",".join(read) == evaluate_video.SETTINGS


def test_clips_show_their_events() -> None:
    clip = draw_clip(60, 5, CAST, random.Random(4))
    again = draw_clip(60, 5, CAST, random.Random(4))
    assert clip.events == again.events
    assert (clip.codes == again.codes).all()
    objects = clip.codes.astype(int) % CAST.objects
    shown = (objects > 0) & (objects <= CAST.colours * CAST.shapes)
    assert shown.sum() == len(clip.events) > 5
    for event in clip.events:
        frame = objects[event.time - clip.first]
        assert 1 + event.colour * CAST.shapes + event.shape in frame
    whole = pixel_table(Cast(colours=12, shapes=24))
    assert len(np.unique(whole.reshape(len(whole), -1), axis=0)) == len(whole)  # all differ
    with pytest.raises(ConfigError, match="frames"):
        draw_clip(901, 2, CAST, random.Random(0))


def test_rows_are_what_the_processor_writes(tmp_path: Path) -> None:
    settings = toy()
    maker = VideoRowMaker(settings, WORDS)
    batch = maker.batch(9)
    assert all(
        (getattr(batch, name) == getattr(maker.batch(9), name)).all()
        for name in ("tokens", "positions", "codes", "weights", "targets", "groups")
    )
    grid = Grid(*batch.grid)
    assert batch.codes.size == len(batch.tokens) * grid.visual_tokens
    assert ((batch.tokens == WORDS[VIDEO]).sum(axis=1) == grid.visual_tokens).all()
    answers = batch.groups >= 0
    assert (batch.weights[answers] >= 1).all()
    assert (batch.tokens.reshape(-1)[batch.places + 1] == batch.targets).all()
    tokenizer = AutoTokenizer.from_pretrained(write_processor(tmp_path / "processor"))
    clip = draw_clip(3, 2, CAST, random.Random(1))
    frames = (
        f"<{clip.first + at}.0 seconds><|vision_start|>{VIDEO * 4}<|vision_end|>" for at in range(3)
    )
    text = "".join(frames) + "What appeared at 104 ?"
    asked = [WORDS[word] for word in ["What", "appeared", "at", "1", "0", "4", "?"]]
    assert tokenizer(text)["input_ids"] == [1, *clip_ids(clip, WORDS), *asked]


def test_settings_are_read_strictly(tmp_path: Path) -> None:
    text = (CONFIGS / "video-toy.toml").read_text()
    for old, new, why in (
        ("shapes = 6", "shapes = 25", "cast.shapes"),
        ("what = 0.4", "whatever = 0.4", "no task"),
        ("shares = [0.7]", "shares = [1.0]", "shares"),
    ):
        assert old in text
        path = tmp_path / "bad.toml"
        path.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=why):
            read_run_settings(path)
    settings = read_run_settings(CONFIGS / "video-1.toml")
    assert isinstance(settings, VideoSettings)
    for stage in settings.stages:
        assert all(settings.micro_batch_tokens % length == 0 for length in stage.lengths)
        for length in stage.lengths:
            for side in stage.sides:
                share = max(*stage.shares, 1 - settings.rows.questions / length)
                Grid.fitting(length, side, share)


@pytest.mark.skipif(
    not hasattr(Qwen3VLProcessor, "replace_video_token"),
    reason="this transformers finds clips by marks that the rows do not have",
)
def test_a_run_learns_and_its_model_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training stopped and resumed, the finished folder in transformers, and every setting."""
    text = (CONFIGS / "video-toy.toml").read_text()
    stages = text[text.index("[[stages]]") : text.index("[mix]")]
    short = "[[stages]]\nlengths = [34]\nsides = [2]\nshares = [0.7]\nsteps = 24\n\n"
    path = tmp_path / "short.toml"
    path.write_text(
        text.replace(stages, short).replace("micro_batch_tokens = 1088", "micro_batch_tokens = 272")
    )
    run = tmp_path / "run"
    arguments = [str(path), "--out", str(run), "--device", "cpu", "--workers", "0"]
    assert train.main([*arguments, "--minutes", "0.001"]) == 3
    assert train.main([*arguments, "--resume"]) == 0
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert losses[-1] < losses[0] or len(losses) == 1
    assert losses[-1] < 4.3  # of a uniform guess: 4.36
    arguments = [
        str(run / "model"), "--cast", "4x6", "--side", "3", "--tokens", "270", "--samples", "2",
        "--batch", "2", "--dtype", "float32", "--tasks", "what,often",
        "--settings", "full;kvswap:group_tokens=4;flexgen@1400KiB",
        "--out", str(run / "evaluation.json"),
    ]  # fmt: skip
    assert evaluate_video.main(arguments) == 0
    cells = json.loads((run / "evaluation.json").read_text())["figures"]["cells"]
    assert [cell["asked"] for cell in cells] == [2] * 6
    assert {cell["right_tokens"] for cell in cells[2::3]} <= {c["right_tokens"] for c in cells[::3]}
    assert "270" in capsys.readouterr().out
    assert model_card.main([str(run)]) == 0
    card = (run / "model" / "README.md").read_text()
    assert "kvswap:group_tokens=4" in card
    assert "Qwen3-VL: 4 layers" in card

    # What the evaluation gives the caches is what transformers makes of pixels and tokens.
    reader = load_reader(run / "model", CAST, device="cpu", dtype="float32")
    grid = Grid(30, 3)
    prompts = [draw_prompt("order", grid, CAST, 5, number) for number in range(2)]
    guessed, _ = reader.read(prompts, grid).answered(prompts, parse_setting("full"), "auto")
    for prompt, said in zip(prompts, guessed, strict=True):
        ids = torch.tensor([prompt.ids + prompt.answer])
        patches = patch_table(CAST, "cpu")[torch.from_numpy(prompt.codes.astype(np.int64))]
        logits = reader.model(
            input_ids=ids,
            pixel_values_videos=patches.flatten(0, 2),
            video_grid_thw=grids_of(grid, 1),
            mm_token_type_ids=2 * (ids == WORDS[VIDEO]).int(),
        ).logits[0]
        assert logits[-len(said) - 1 : -1].argmax(-1).tolist() == said


def test_positions_are_those_of_transformers(tmp_path: Path) -> None:
    settings = toy()
    model: Qwen3VLForConditionalGeneration = build(settings.model, settings.vision, WORDS, 0)
    grid = Grid(4, 3)
    ids = torch.tensor([[1, *clip_ids(draw_clip(*grid, CAST, random.Random(2)), WORDS), 20, 21]])
    times = torch.from_numpy(video_positions(ids.shape[1], grid))[None]
    kinds = 2 * (ids == WORDS[VIDEO]).int()
    theirs, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=kinds, video_grid_thw=grids_of(grid, 1)
    )
    assert torch.equal(on_axes(times, grid), theirs)
    plan = replace(settings.rows, jump_share=1.0)
    far = video_positions(ids.shape[1], grid, plan, np.random.default_rng(0))
    assert far[-1] > times[0, -1]
    inside = 1 + 6 + np.arange(9)
    assert len(set(far[inside].tolist())) == 1
