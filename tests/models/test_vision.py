"""Models that see: pictures and videos in prompts, positions of rows, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.core.errors import CacheStateError, ConfigError, PromptError, UnsupportedModelError
from penstock.generation.engine import LLM
from penstock.generation.prompts import TextWithMedia, encode
from penstock.generation.sampling import SamplingParams
from penstock.methods import KVSwap
from penstock.models.cache_adapter import TieredCache
from penstock.models.cache_argument import cache_argument
from penstock.models.loader import LoadedModel
from penstock.models.media import read_video
from penstock.models.processing import Media
from penstock.search.beam_searcher import BeamSearcher
from penstock.testing.tiny_vision import END, IMAGE, START, VIDEO, tiny_picture, tiny_vision_model

NEW = 6
QWEN = ("qwen2_5_vl", "qwen3_vl")
SMALL = KVSwap(group_tokens=4, selected_tokens=16, window_tokens=8, sink_tokens=4)
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)


def mark(loaded: LoadedModel, kind: str = IMAGE) -> str:
    return f"{START}{kind}{END}" if "qwen" in loaded.name else kind


def processed(
    loaded: LoadedModel, text: str, pictures: list[Any], video: Any = None, **given: Any
) -> Any:
    """What the model's own processor makes of a text."""
    if pictures:
        given["images"] = [Image.fromarray(each) for each in pictures]
    if video is not None:
        numbers = list(range(len(video)))
        said = {"total_num_frames": len(video), "fps": 2.0, "frames_indices": numbers}
        given |= {"videos": [video], "video_metadata": [said], "do_sample_frames": False}
    return loaded.processor(text=[text], return_tensors="pt", **given)


def plain(loaded: LoadedModel, inputs: Any, cache: Any = None, **options: Any) -> list[int]:
    """New tokens of the plain model, or of one with a cache."""
    given = {} if cache is None else cache_argument(loaded.model, cache)
    model: Any = loaded.model
    with torch.no_grad():
        out = model.generate(
            **inputs, **given, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
            pad_token_id=0, **options,
        )  # fmt: skip
    return [int(token) for token in out[0, inputs["input_ids"].shape[1] :]]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "internvl", "llava"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny_vision_model(request.param)


def frames(count: int) -> np.ndarray[Any, Any]:
    return np.stack([tiny_picture(i) for i in range(count)])


def test_a_batch_with_pictures_gives_the_plain_models_tokens(loaded: LoadedModel) -> None:
    """Padded rows with two pictures, one, none and a video, whole and in chunks through pictures,
    fetched from a store, and drafted and checked."""
    first, second = tiny_picture(0, 84, 84), tiny_picture(1, 84, 112)
    texts = [
        f"look {mark(loaded)} at this {mark(loaded)} thing", f"and {mark(loaded)} now", "a text",
    ]  # fmt: skip
    media: list[dict[str, Any]] = [{"image": [first, second]}, {"image": second}, {}]
    expected = [
        plain(loaded, processed(loaded, text, [first, second][2 - count :]))
        for text, count in zip(texts, (2, 1, 0), strict=True)
    ]
    if (
        hasattr(loaded.processor, "replace_video_token") and "qwen" in loaded.name
    ):  # more frames than a picture is wide: positions fall back
        texts.append(f"see {mark(loaded, VIDEO)} well")
        media.append({"video": [frames(7)]})
        expected.append(plain(loaded, processed(loaded, texts[-1], [], frames(7))))
    prompts = [
        {"prompt": text, "multi_modal_data": each} for text, each in zip(texts, media, strict=True)
    ]
    small: dict[str, Any] = {"policy": SMALL, "memory": "600KiB", "store": "memory"}
    for options in ({"exact": True}, {"verify": 2, "prefill_chunk_size": 7}):
        outputs = LLM(loaded, **small, **options).generate(prompts, GREEDY, use_tqdm=False)
        assert [each.token_ids for each in outputs] == expected, options
        assert outputs[0].run.stats.prefill.read_bytes or outputs[0].run.stats.decode.read_bytes


def test_tokens_of_a_prompt_are_the_processors(loaded: LoadedModel) -> None:
    pictures = [tiny_picture(0), tiny_picture(1, 84, 112)]
    text = f"look {mark(loaded)} at {mark(loaded)}"
    made = processed(loaded, text, pictures)
    ids = encode(loaded, TextWithMedia.of(text, [Media("image", each) for each in pictures]))
    assert ids == made["input_ids"][0].tolist()
    one = LLM(loaded).generate(dict(made), GREEDY, use_tqdm=False)
    assert one[0].token_ids == plain(loaded, made)
    assert one[0].prompt_token_ids == ids
    parts = [{"type": "image", "image": pictures[0]}, {"type": "text", "text": "Say."}]
    [said] = LLM(loaded).chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    assert said.prompt is not None
    made = processed(loaded, said.prompt, pictures[:1], add_special_tokens=False)
    assert said.token_ids == plain(loaded, made)


@pytest.mark.parametrize("family", QWEN)
def test_positions_belong_to_the_rows_of_a_cache(family: str) -> None:
    """Two chats of `model.generate` on one model, a step of each in turn, and a fork of each."""
    loaded = tiny_vision_model(family)
    turns = [
        [processed(loaded, f"a {mark(loaded)} b", [tiny_picture(0, 112, 56)])],
        [processed(loaded, f"a longer text with {mark(loaded)}", [tiny_picture(1, 56, 112)])],
    ]
    more = torch.tensor([[40, 41, 42]])

    def run(inputs: Any, cache: Any, turn: int) -> list[int]:
        return plain(loaded, inputs if turn == 0 else {"input_ids": inputs}, cache)

    def second(first: Any, new: list[int]) -> Any:
        return torch.cat([first["input_ids"], torch.tensor([new]), more], dim=1)

    expected = []
    for [inputs] in turns:
        cache = _plain_cache(loaded)
        new = run(inputs, cache, 0)
        expected.append((new, run(second(inputs, new), cache, 1)))
    with _cache(loaded) as one, _cache(loaded) as other:
        caches, found = (
            [one, other],
            [run(t[0], c, 0) for t, c in zip(turns, (one, other), strict=True)],
        )
        assert found == [new for new, _ in expected]
        for number, cache in enumerate(caches):
            cache.batch_repeat_interleave(2)
            again = second(turns[number][0], found[number])
            answers = plain(loaded, {"input_ids": again.expand(2, -1)}, cache)
            assert answers == expected[number][1]
            cache.crop(len(again[0]) - len(more[0]) - cache.get_seq_length())
            repeated = plain(loaded, {"input_ids": again.expand(2, -1)}, cache)
            assert repeated == expected[number][1]


def _plain_cache(loaded: LoadedModel) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=loaded.model.config)


def _cache(loaded: LoadedModel) -> TieredCache:
    return TieredCache(
        loaded.model, SMALL, "500KiB", "memory", max_tokens=120, batch_size=2, exact=True
    )


def test_a_cache_that_ends_within_a_picture_says_so() -> None:
    loaded = tiny_vision_model("qwen2_5_vl")
    inputs = processed(loaded, f"a {mark(loaded)} b", [tiny_picture(0, 112, 112)])
    with _cache(loaded) as cache:
        plain(loaded, inputs, cache)
        cache.crop(8)
        with pytest.raises(CacheStateError, match="ends within a picture"):
            plain(loaded, {"input_ids": torch.tensor([[5] * 12])}, cache)


def test_gemmas_pictures_are_refused_and_its_text_is_not() -> None:
    loaded = tiny_vision_model("gemma3")
    llm = LLM(loaded, memory=None)
    text = "nothing but text"
    [said] = llm.generate(text, GREEDY, use_tqdm=False)
    assert said.token_ids == plain(loaded, loaded.processor(text=[text], return_tensors="pt"))
    prompt = {
        "prompt": f"look {loaded.processor.boi_token}",
        "multi_modal_data": {"image": tiny_picture(0)},
    }
    with pytest.raises(UnsupportedModelError, match="see each other"):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_what_a_prompt_with_pictures_cannot_be(tmp_path: Path) -> None:
    loaded = tiny_vision_model("llava")
    llm = LLM(loaded, memory=None)

    def ask(text: str, **data: Any) -> None:
        llm.generate({"prompt": text, "multi_modal_data": data}, GREEDY, use_tqdm=False)

    with pytest.raises(PromptError, match="0 places"):
        ask("no place", image=tiny_picture(0))
    with pytest.raises(PromptError, match="takes no videos"):
        ask(VIDEO, video=frames(2))
    with pytest.raises(PromptError, match="nothing else"):
        ask(IMAGE, audio=b"")
    with pytest.raises(PromptError, match="cannot read the picture"):
        ask(IMAGE, image=tmp_path / "none.png")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(PromptError, match="no picture that can be read"):
        ask(IMAGE, image=tmp_path / "text.png")
    with pytest.raises(PromptError, match="nothing is fetched"):
        ask(IMAGE, image="https://example.com/a.png")
    shown = {"prompt": IMAGE, "multi_modal_data": {"image": tiny_picture(0)}}
    with pytest.raises(PromptError, match="a search reads texts alone"):
        BeamSearcher(loaded).search(shown)
    several = loaded.processor(
        text=[IMAGE, IMAGE], images=[Image.fromarray(tiny_picture(i)) for i in (0, 1)],
        return_tensors="pt",
    )  # fmt: skip
    with pytest.raises(PromptError, match="cannot be told apart"):
        llm.generate(dict(several), GREEDY, use_tqdm=False)
    alone = LoadedModel(model=loaded.model, tokenizer=loaded.tokenizer, name="it")
    with pytest.raises(PromptError, match="came without its processor"):
        LLM(alone).generate(
            {"prompt": IMAGE, "multi_modal_data": {"image": tiny_picture(0)}}, GREEDY
        )


def test_frames_come_from_a_folder_in_order_of_their_names(tmp_path: Path) -> None:
    for number in (2, 1, 10):
        Image.fromarray(tiny_picture(number)).save(tmp_path / f"{number:03}.png")
    (tmp_path / "notes.txt").write_text("no frame")
    found = read_video(tmp_path, None)
    assert np.array_equal(found.pixels, np.stack([tiny_picture(i) for i in (1, 2, 10)]))
    with pytest.raises(PromptError, match="no frames"):
        read_video(tmp_path.parent / tmp_path.name / "..", None)
    with pytest.raises((PromptError, ConfigError), match=r"cannot read the video|not installed"):
        read_video(tmp_path / "notes.txt", None)
