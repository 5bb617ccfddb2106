"""Messages become the tokens of the tokenizer's own template, or are refused in one line."""

import json
from typing import Any

import pytest

from penstock.core.errors import ConfigError, PromptError
from penstock.evaluate.tasks.english.prompt_fit import Prompter
from penstock.generation.chat_template import ChatTemplate, Message, has_chat_template
from penstock.generation.engine import LLM
from penstock.generation.sampling import SamplingParams
from penstock.testing.tiny_chat import CHATML, byte_tokenizer, tiny_chat_model

USER = {"role": "user", "content": "Where ?"}
GREEDY = SamplingParams(temperature=0, max_tokens=4)
WRITES_BOS = "{{ bos_token }}" + CHATML
PARTS = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %};{% endfor %}"
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_chat_model(), policy="full", memory=None, store="memory")


def test_the_answer_is_that_of_the_templates_tokens(llm: LLM) -> None:
    tokenizer: Any = llm.tokenizer
    encoded = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=True)
    [chat] = llm.chat([USER], GREEDY)
    assert chat.prompt_token_ids == list(encoded["input_ids"])
    assert chat.prompt == "<|im_start|>user\nWhere ?<|im_end|>\n<|im_start|>assistant\n"
    [plain] = llm.generate(list(encoded["input_ids"]), GREEDY)
    assert chat.token_ids == plain.token_ids


def test_no_token_stands_twice_in_front() -> None:
    assert byte_tokenizer()("x")["input_ids"][0] == byte_tokenizer().bos_token_id
    llm = LLM(tiny_chat_model(template=WRITES_BOS), policy="full", memory=None, store="memory")
    [output] = llm.chat([USER], GREEDY)
    bos = llm.tokenizer.bos_token_id  # type: ignore[union-attr]
    assert output.prompt_token_ids[0] == bos
    assert output.prompt_token_ids.count(bos) == 1


def test_several_conversations_are_one_batch(llm: LLM) -> None:
    other: list[Message] = [{"role": "system", "content": "Be brief ."}, USER]
    other += [{"role": "assistant", "content": "There ."}, USER]
    both: list[list[Message]] = [[USER], other]
    together = llm.chat(both, GREEDY)
    alone = [llm.chat(each, GREEDY)[0] for each in both]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert together[1].prompt_tokens > together[0].prompt_tokens


def test_the_last_message_is_gone_on_with(llm: LLM) -> None:
    messages = [USER, {"role": "assistant", "content": "In the"}]
    [output] = llm.chat(messages, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt is not None
    assert output.prompt.endswith("assistant\nIn the")
    with pytest.raises(ConfigError, match="ask for one of them"):
        llm.chat(messages, GREEDY, continue_final_message=True)


def test_parts_of_a_text_are_one_text_or_parts_as_the_template_has_it() -> None:
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
    }
    template = ChatTemplate()
    assert "user\na\nb<|im_end|>" in template.render(byte_tokenizer(), [parts])
    assert template.render(byte_tokenizer(PARTS), [parts]) == "user:a\nb;"
    assert template.render(byte_tokenizer(PARTS), [USER]) == "user:Where ?;"
    forced = ChatTemplate(content_format="string")
    assert forced.render(byte_tokenizer(PARTS), [USER]) == "user:;"


def test_tools_and_variables_reach_the_template() -> None:
    text = (
        "{{ tools[0]['name'] }} {{ mood }} "
        "{{ messages[0]['tool_calls'][0]['function']['arguments']['x'] }}"
    )
    call = {"function": {"name": "f", "arguments": json.dumps({"x": 3})}}
    template = ChatTemplate(text=text, tools=[{"name": "f"}], kwargs={"mood": "glad"})
    said = template.render(byte_tokenizer(None), [{"role": "assistant", "tool_calls": [call]}])
    assert said == "f glad 3"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("Where ?", "messages are a list"),
        (USER, "messages are a list"),
        ([], "no message"),
        ([[USER], []], "no message"),
        ([{"content": "x"}], "has no role"),
        (["x"], "has no role"),
        ([{"role": "user", "content": 3}], "a int; give a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type image_url"),
        ([{"role": "user", "content": "\ud800"}], "not UTF-8"),
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any, says: str) -> None:
    with pytest.raises(PromptError, match=says):
        llm.chat(messages, GREEDY)


def test_a_template_that_refuses_is_one_line(llm: LLM) -> None:
    text = "{{ raise_exception('No system role\nhere') }}"
    with pytest.raises(PromptError, match="refuses the conversation: No system role here"):
        llm.chat([USER], GREEDY, chat_template=text)
    with pytest.raises(PromptError, match="refuses the conversation"):
        llm.chat([USER], GREEDY, chat_template="{% if %}")


def test_without_a_template_it_is_said_what_to_do() -> None:
    llm = LLM(tiny_chat_model(template=None), policy="full", memory=None, store="memory")
    assert not has_chat_template(llm.tokenizer)
    with pytest.raises(ConfigError, match=r"no chat template.*--raw.*chat_template"):
        llm.chat([USER], GREEDY)
    [output] = llm.chat([USER], GREEDY, chat_template=CHATML)
    assert output.prompt_tokens > 10


def test_what_is_left_out_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="lora_request"):
        llm.chat([USER], GREEDY, lora_request="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tokenize"):
        llm.chat([USER], GREEDY, chat_template_kwargs={"tokenize": True})
    with pytest.raises(ConfigError, match="chat_template_content_format"):
        llm.chat([USER], GREEDY, chat_template_content_format="text")  # type: ignore[arg-type]


def test_the_bench_asks_through_the_same_template() -> None:
    tokenizer = byte_tokenizer(WRITES_BOS)
    prompter = Prompter(tokenizer, chat=True)
    prompt = prompter.render("Where ?", "Here")
    assert prompt == ChatTemplate().render(tokenizer, [USER]) + "Here"
    assert list(prompter.ids(prompt)).count(tokenizer.bos_token_id) == 1
