"""Clients as they are: what they send is answered, and what is answered they can read."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import openai

# Each client takes a second to import, which only the process that runs these tests pays.

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LONG = {"ignore_eos": True}
"""Answers of a model that has learnt nothing end anywhere."""
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(url: str) -> "Iterator[openai.OpenAI]":
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_chats_whole_and_streamed(client: "openai.OpenAI") -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 12, "extra_body": LONG,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert len(choice.logprobs.content) == 12
    assert choice.logprobs.content[0].token == choice.logprobs.content[0].top_logprobs[0].token
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert last.usage == whole.usage
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    several = client.chat.completions.create(
        model="tiny", messages=HELLO, n=3, seed=4, max_tokens=5, temperature=1, stop=["!"]
    )
    assert [each.index for each in several.choices] == [0, 1, 2]
    assert [each.id for each in client.models.list()] == ["tiny"]


def test_openai_completes_several_prompts(client: "openai.OpenAI") -> None:
    asked = {"model": "tiny", "prompt": ["One", "Two"], "temperature": 0, "max_tokens": 6}
    whole = client.completions.create(**asked, logprobs=1)
    assert [each.index for each in whole.choices] == [0, 1]
    assert whole.choices[0].logprobs.text_offset[0] == 0
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for each in chunk.choices:
            texts[each.index] += each.text
    assert texts == [each.text for each in whole.choices]


def test_openai_gets_forms_and_calls(client: "openai.OpenAI") -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, response_format=form, n=2, temperature=1, seed=1
    )
    for choice in answer.choices:
        made = json.loads(choice.message.content)
        assert made["b"] in "xy"
        assert 0 <= made["a"] <= 9
    tool = {"type": "function", "function": {"name": "pair", "parameters": SCHEMA}}
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [tool], "max_tokens": 200}
    named = {"type": "function", "function": {"name": "pair"}}
    message = client.chat.completions.create(**asked, tool_choice=named).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "pair"
    assert json.loads(call.function.arguments)["b"] in "xy"
    with client.chat.completions.stream(**asked, tool_choice="required") as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert json.loads(final.message.tool_calls[0].function.arguments)["b"] in "xy"
    either = client.chat.completions.create(
        **asked, response_format=form, n=8, temperature=1, seed=1
    )
    for choice in either.choices:
        calls = choice.message.tool_calls or []
        made = json.loads(calls[0].function.arguments if calls else choice.message.content)
        assert made["b"] in "xy"
    told = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    again = client.chat.completions.create(
        model="tiny", messages=[*HELLO, message, told], tools=[tool], max_tokens=3, extra_body=LONG
    )
    assert again.usage.completion_tokens == 3


def test_openai_hears_what_is_wrong(client: "openai.OpenAI") -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="8,192 positions") as long:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a" * 9000}]
        )
    assert long.value.code == "context_length_exceeded"
    part = {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}
    with pytest.raises(openai.BadRequestError, match="nothing is fetched"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [part]}])
    with pytest.raises(openai.InternalServerError, match="embeddings are not made here"):
        client.embeddings.create(model="tiny", input="a text")


CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are a coding agent running in a terminal.",
    "input": [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "<permissions>read only</permissions>"}]},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        {"type": "function_call", "name": "shell", "call_id": "call_1",
         "arguments": '{"command": ["ls"]}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "README.md"},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "What is there?"}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False,
         "parameters": {"type": "object", "required": ["command"], "properties": {
             "command": {"type": "array", "items": {"type": "string"}}}}},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "client_metadata": {"x-codex-installation-id": "1"},
}  # fmt: skip
"""What Codex sends, by its fields."""


def test_responses_as_codex_asks(client: "openai.OpenAI") -> None:
    import openai

    asked: dict[str, Any] = {
        "model": "tiny", "input": "Hello", "temperature": 0, "max_output_tokens": 7,
        "extra_body": LONG,
    }  # fmt: skip
    whole = client.responses.create(**asked)
    assert whole.status == "incomplete"
    assert whole.usage.output_tokens == 7
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert events[-1].response.output_text == whole.output_text
    assert [each.sequence_number for each in events] == list(range(len(events)))
    body = {**CODEX, "max_output_tokens": 9, **LONG}
    events = list(client.post("/responses", body=body, cast_to=object, stream=True,
                              stream_cls=openai.Stream[dict[str, object]]))  # fmt: skip
    assert events[-1]["response"]["usage"]["output_tokens"] == 9
    probe = client.responses.create(model="tiny", input=[], max_output_tokens=2, extra_body=LONG)
    assert probe.usage.output_tokens == 2
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="tiny", input="x", previous_response_id="resp_1")
    form = {"format": {"type": "json_schema", "name": "pair", "schema": SCHEMA}}
    made = client.responses.create(model="tiny", input="Hello", text=form, temperature=1)
    assert json.loads(made.output_text)["b"] in "xy"
    tool = {"type": "function", "name": "pair", "parameters": SCHEMA}
    asked = {"model": "tiny", "input": "Hello", "tools": [tool], "tool_choice": "required"}
    with client.responses.stream(**asked, max_output_tokens=200) as stream:
        [call] = stream.get_final_response().output
    assert json.loads(call.arguments)["b"] in "xy"


def test_anthropic_talks_and_calls(url: str) -> None:
    import anthropic

    asked: dict[str, Any] = {
        "model": "tiny", "messages": HELLO, "max_tokens": 8, "system": "You are short.",
        "extra_body": {"temperature": 0, **LONG},
    }  # fmt: skip
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**asked)
        assert whole.stop_reason == "max_tokens"
        assert whole.usage.output_tokens == 8
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
        counted = client.messages.count_tokens(model="tiny", messages=HELLO)
        assert 0 < counted.input_tokens < whole.usage.input_tokens
        tool = {"name": "pair", "input_schema": SCHEMA}
        calling = {**asked, "max_tokens": 200, "extra_body": {"temperature": 1}, "tools": [tool],
                   "tool_choice": {"type": "any"}}  # fmt: skip
        with client.messages.stream(**calling) as stream:
            final = stream.get_final_message()
        [used] = final.content
        assert final.stop_reason == "tool_use"
        assert used.input["b"] in "xy"
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "done"}
        after = [*HELLO, {"role": "assistant", "content": final.content},
                 {"role": "user", "content": [result]}]  # fmt: skip
        again = client.messages.create(**{**asked, "messages": after, "tools": [tool]})
        assert again.usage.output_tokens == 8
        with pytest.raises(anthropic.BadRequestError, match="8,192 positions"):
            client.messages.create(
                **{**asked, "messages": [{"role": "user", "content": "a" * 9000}]}
            )


def test_other_clients_where_they_are_installed(url: str) -> None:
    curl = shutil.which("curl")
    if curl is not None:
        body = json.dumps({"messages": HELLO, "max_tokens": 3, "stream": True})
        said = subprocess.run(
            [curl, "-sN", "--noproxy", "*", f"{url}/v1/chat/completions", "-d", body,
             "-H", "Content-Type: application/json"],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip
        assert said.endswith("data: [DONE]\n\n")
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_tokens=5)
    assert chat.invoke("Hello").usage_metadata["output_tokens"] <= 5
    assert "".join(each.content for each in chat.stream("Hello"))
