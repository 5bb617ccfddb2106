"""A chat on one cache: no token is prefilled twice, whatever template, disk or Ctrl-C do."""

from pathlib import Path
from typing import Any

import pytest

from penstock import KVSwap
from penstock.core.errors import ConfigError, DocumentFormatError, PromptError
from penstock.documents.conversation import Conversation
from penstock.documents.document import Document
from penstock.documents.settings import DocumentSettings
from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.models.loader import LoadedModel
from penstock.testing.tiny_chat import CHATML, byte_tokenizer, tiny_chat_model
from penstock.testing.tiny_models import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=5)
SETTINGS = DocumentSettings(store="memory", prefill_chunk_size=64)
QUESTIONS = ["Who ?", "And where is that then ?", "When ?", "Why so ?", "Since when, and how ?"]
FILE = "The bridge was built by Anna in the year of the flood. " * 12
TIERED = KVSwap(selected_tokens=64, window_tokens=16)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_chat_model()


def begin(loaded: LoadedModel, **options: Any) -> Conversation:
    options = {"policy": TIERED, "memory": None, "settings": SETTINGS, **options}
    return Conversation(loaded, **options)


def rendered(loaded: LoadedModel, chat: Conversation) -> list[int]:
    """Tokens of the history as the template has it now."""
    tokenizer: Any = loaded.tokenizer
    text = tokenizer.apply_chat_template(chat.messages, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("policy", ["full", TIERED, "flexgen"], ids=["full", "kvswap", "flexgen"])
def test_no_token_is_prefilled_twice(loaded: LoadedModel, policy: Any) -> None:
    with begin(loaded, policy=policy, system="Be brief.") as chat:
        for question in QUESTIONS:
            before = len(chat.tokens)
            turn = chat.ask(question, GREEDY)
            assert turn.prefilled_tokens == turn.output.prompt_tokens - before
            assert turn.dropped_tokens == 0
            assert turn.output.run.stats.prefill.tokens == chat.counts.prefilled_tokens
        counts, tokens = chat.counts, chat.tokens
        assert counts.turns == 5
        assert counts.dropped_tokens == 0
        assert counts.prefilled_tokens + counts.decoded_tokens == len(tokens) == counts.held_tokens
        # Of the last turn the template puts the end, and the newline behind it, with the next one.
        assert tokens == rendered(loaded, chat)[: len(tokens)]
        assert len(rendered(loaded, chat)) - len(tokens) <= 3


def test_verified_turns_are_those_of_full_attention(loaded: LoadedModel) -> None:
    few = KVSwap(selected_tokens=16, window_tokens=8)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with begin(loaded, policy="full") as plain, begin(loaded, policy=few, verify=4) as chat:
        plain.attach(FILE)
        chat.attach(FILE)
        for question in QUESTIONS[:3]:
            expected, turn = plain.ask(question, params), chat.ask(question, params)
            assert turn.output.token_ids == expected.output.token_ids
            assert turn.prefilled_tokens == expected.prefilled_tokens
            assert turn.output.run.verified is not None
            assert turn.output.run.verified.passes > 0
        assert chat.tokens == plain.tokens


def test_tokens_of_the_models_own_stay_where_the_tokenizer_would_make_others() -> None:
    loaded = tiny_chat_model(ascii_alone=False)
    with begin(loaded) as chat:
        for question in QUESTIONS:
            chat.ask(question, GREEDY)
        assert "\ufffd" in chat.messages[1]["content"], "bytes that are no character"
        assert rendered(loaded, chat)[: len(chat.tokens)] != chat.tokens
        assert chat.counts.dropped_tokens == 0
        assert chat.counts.held_tokens == len(chat.tokens)


def test_answers_are_those_of_each_history_anew(loaded: LoadedModel) -> None:
    with begin(loaded, policy="full") as chat:
        said = [chat.ask(question, GREEDY).output.token_ids for question in QUESTIONS[:3]]
        messages = chat.messages
    llm = LLM(loaded, policy="full", memory=None, store="memory")
    for number, ids in enumerate(said):
        assert llm.chat(messages[: 2 * number + 1], GREEDY)[0].token_ids == ids


def test_a_file_is_read_once_and_belongs_to_the_next_message(loaded: LoadedModel) -> None:
    seen: list[tuple[int, int]] = []
    with begin(loaded) as chat:
        chat.ask("Hello", GREEDY)
        read = chat.attach(FILE, on_tokens=lambda *each: seen.append(each))
        assert len(FILE) <= read < len(FILE) + 40
        assert seen[0] == (0, read)
        assert seen[-1] == (read, read)
        turn = chat.ask("Who built it ?", GREEDY)
        assert turn.prefilled_tokens < 60
        assert turn.dropped_tokens == 0
        assert chat.messages[2]["content"] == f"{FILE}\n\nWho built it ?"
        assert chat.attached == []
        assert chat.tokens == rendered(loaded, chat)[: len(chat.tokens)]


@pytest.mark.parametrize(
    ("policy", "memory"), [("full", None), (TIERED, None), ("kvswap", "auto")],
    ids=["full", "tiered", "all in memory"],
)  # fmt: skip
def test_a_saved_chat_goes_on_as_if_nothing_had_been(
    loaded: LoadedModel, policy: Any, memory: Any, tmp_path: Path
) -> None:
    def ask(chat: Conversation, questions: list[str]) -> list[list[int]]:
        return [chat.ask(each, GREEDY).output.token_ids for each in questions]

    with begin(loaded, policy=policy, memory=memory) as chat:
        chat.attach(FILE * 2)
        ask(chat, QUESTIONS[:3])
        written = chat.save(tmp_path / "trip")
        assert chat.folder == tmp_path / "trip"
        ask(chat, QUESTIONS[3:4])
        assert 0 < chat.save(tmp_path / "trip") < written
        expected = ask(chat, QUESTIONS[4:])
        messages, counts = chat.messages, chat.counts
    with Conversation.resume(loaded, tmp_path / "trip", settings=SETTINGS) as again:
        assert again.messages == messages[:8]
        held = again.counts.restored_tokens
        assert ask(again, QUESTIONS[4:]) == expected
        assert again.messages == messages
        assert again.counts.dropped_tokens == 0
        assert again.counts.prefilled_tokens < 60
        assert held + again.counts.prefilled_tokens + again.counts.decoded_tokens == (
            counts.held_tokens
        )
        again.save(tmp_path / "trip")
        again.save(tmp_path / "copy")
    for name in ("trip", "copy"):
        with Conversation.resume(loaded, tmp_path / name, settings=SETTINGS) as more:
            assert more.messages == messages
            assert more.counts.restored_tokens == counts.held_tokens


def test_an_answer_that_is_stopped_stays_as_far_as_it_was_told(loaded: LoadedModel) -> None:
    pieces: list[str] = []
    with begin(loaded) as chat:
        turn = chat.ask(
            "Who ?", GREEDY, on_text=pieces.append, should_stop=lambda: len(pieces) >= 3
        )
        assert turn.output.finish_reason == "abort"
        assert turn.text == "".join(pieces)
        assert chat.messages[-1] == {"role": "assistant", "content": turn.text}
        shown = len(chat.tokens) - turn.output.prompt_tokens
        assert shown == len(turn.output.token_ids) - 1, "the last one comes with the next turn"
        again = chat.ask("Where ?", GREEDY)
        assert again.dropped_tokens == 0
        assert chat.counts.held_tokens == len(chat.tokens)


class Interrupted(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize("policy", ["full", TIERED], ids=["full", "kvswap"])
def test_a_turn_that_is_cut_is_given_up_and_the_chat_goes_on(
    loaded: LoadedModel, policy: Any
) -> None:
    def cut(*_: object) -> None:
        raise Interrupted

    def cut_late(done: int, total: int) -> None:
        if done > 100:
            raise Interrupted

    with begin(loaded, policy=policy) as chat:
        chat.ask("Who ?", GREEDY)
        held, messages = chat.tokens, chat.messages
        with pytest.raises(Interrupted):
            chat.ask("Where ?", GREEDY, on_text=cut)
        with pytest.raises(Interrupted):
            chat.attach(FILE, on_tokens=cut_late)
        assert chat.messages == messages
        assert chat.attached == []
        assert chat.tokens[: len(held)] == held
        assert chat.counts.held_tokens == len(chat.tokens)
        before = chat.counts.prefilled_tokens
        chat.attach(FILE)  # goes on where it was cut
        assert chat.counts.prefilled_tokens - before < len(FILE)
        said = chat.ask("Where ?", GREEDY).output.token_ids
        tokens = chat.tokens
    with begin(loaded, policy=policy) as calm:
        calm.ask("Who ?", GREEDY)
        calm.attach(FILE)
        assert calm.ask("Where ?", GREEDY).output.token_ids == said
        assert calm.tokens == tokens


STRIPS = (
    CHATML.replace("message['content']", "(message['content'] | replace('e', ''))")
    .replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message['role'] == 'user' or not loop.last %}",
    )
    .replace("{% endfor %}", "{% endif %}{% endfor %}")
)
TRIMS = CHATML.replace("message['content']", "(message['content'] | trim)")


@pytest.mark.parametrize("template", [STRIPS, TRIMS])
def test_a_template_that_rewrites_history(template: str) -> None:
    loaded = tiny_chat_model(template=template)
    with begin(loaded) as chat:
        for question in QUESTIONS:
            chat.ask(question, GREEDY)
            assert chat.counts.held_tokens == len(chat.tokens)
        prompt = loaded.tokenizer.apply_chat_template(  # type: ignore[union-attr]
            chat.messages[:-1], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert chat.tokens[: len(prompt)] == prompt


def test_windows_that_cannot_go_back_are_read_again() -> None:
    loaded = LoadedModel(model=tiny_model("gemma2"), tokenizer=byte_tokenizer(), name="windows")
    with begin(loaded, system="Be brief.") as chat:
        chat.ask("Who ?", GREEDY)
        chat.system = "Be long."
        turn = chat.ask("Where ?", GREEDY)
        assert turn.prefilled_tokens == turn.output.prompt_tokens, "nothing could be kept"
        assert chat.counts.held_tokens == len(chat.tokens)


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_damaged_is_prefilled_again(loaded: LoadedModel, tmp_path: Path, when: str) -> None:
    def damage() -> None:
        raw = bytearray((tmp_path / "c" / "kv-0.units").read_bytes())
        for at in range(100, len(raw), 4096):
            raw[at] ^= 1
        (tmp_path / "c" / "kv-0.units").write_bytes(raw)

    with begin(loaded) as chat:
        chat.attach(FILE)
        chat.ask("Who ?", GREEDY)
        chat.save(tmp_path / "c")
        expected = chat.ask("Where ?", GREEDY).output.token_ids
    if when == "before":
        damage()
    with Conversation.resume(loaded, tmp_path / "c", settings=SETTINGS) as again:
        if when == "after":
            damage()
        assert again.ask("Where ?", GREEDY).output.token_ids == expected
        again.save(tmp_path / "c")
    with Document.open(loaded, tmp_path / "c", settings=SETTINGS) as document:
        assert not document.verify()


def test_another_system_prompt_reads_all_again(loaded: LoadedModel) -> None:
    with begin(loaded, system="Be brief.") as chat:
        chat.ask("Who ?", GREEDY)
        chat.system = "Be long."
        turn = chat.ask("Where ?", GREEDY)
        assert turn.dropped_tokens > 10
        assert turn.prefilled_tokens + len("<|>system\nBe ") > turn.output.prompt_tokens - 10
        chat.clear()
        assert chat.messages == [{"role": "system", "content": "Be long."}]
        assert chat.tokens == []
        assert chat.ask("Who ?", GREEDY).prefilled_tokens > 10


def test_a_full_chat_says_so(loaded: LoadedModel) -> None:
    with begin(loaded, max_tokens=120) as chat:
        long = SamplingParams(temperature=0, max_tokens=500)
        turn = chat.ask("Who ?", long)
        assert turn.is_full
        assert turn.output.prompt_tokens + len(turn.output.token_ids) == 120
        with pytest.raises(PromptError, match=r"the chat is full: it holds 119 of 120 tokens"):
            chat.ask("Where ?", long)
        with pytest.raises(PromptError, match="the chat is full"):
            chat.attach(FILE)
        chat.clear()
        assert chat.ask("Who ?", GREEDY).text


def test_refusals(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        begin(tiny_chat_model(template=None))
    with pytest.raises(ConfigError, match="without a tokenizer"):
        Conversation(loaded.model)
    with pytest.raises(ConfigError, match="must lie in 2 to 4,096"):
        begin(loaded, max_tokens=5000)
    (tmp_path / "mine").mkdir()
    with begin(loaded) as chat:
        with pytest.raises(ConfigError, match="nothing to save"):
            chat.save(tmp_path / "x")
        with pytest.raises(PromptError, match="empty"):
            chat.attach("  ")
        chat.ask("Who ?", GREEDY)
        with pytest.raises(ConfigError, match="is there already"):
            chat.save(tmp_path / "mine")
        chat.save(tmp_path / "x")
    with begin(loaded) as other:
        other.ask("Who ?", GREEDY)
        with pytest.raises(ConfigError, match="was not saved there"):
            other.save(tmp_path / "x")
    with pytest.raises(ConfigError, match="a max_tokens above"):
        Conversation.resume(loaded, tmp_path / "x", max_tokens=20, settings=SETTINGS)
    with (
        Document.open(loaded, tmp_path / "x", settings=SETTINGS) as document,
        pytest.raises(ConfigError, match="is a chat"),
    ):
        document.ask("?", GREEDY, keep=True)
    Document.create(loaded, "A text.", tmp_path / "text", settings=SETTINGS).close()
    with pytest.raises(DocumentFormatError, match="no chat"):
        Conversation.resume(loaded, tmp_path / "text", settings=SETTINGS)
