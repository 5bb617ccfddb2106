"""Bodies of requests as clients send them: fields that are read, and those that are refused."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from penstock.server.errors import refused

Stop: TypeAlias = str | Annotated[list[str], Field(max_length=32)] | None
_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")


class Body(BaseModel):
    """A request's JSON object. Fields that are not known change nothing, and are let be."""

    model_config = ConfigDict(extra="allow")


class Sampling(Body):
    """How tokens are chosen, under OpenAI's names and vLLM's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None


class StreamOptions(Body):
    """What a stream has beside its text."""

    include_usage: bool = False


class Stored(Body):
    """What names stored KV."""

    document: str | None = None
    """A stored document that the prompt stands behind; another name is refused."""
    prompt_cache_key: str | None = None
    """The same, where there is such a document; else it changes nothing."""
    cache_salt: str | None = None
    """Nothing that was stored under another salt is found."""


class Part(Body):
    """A part of a content."""

    type: str
    text: str | None = None


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Function(Body):
    """What a tool that is a function says of itself."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool."""

    type: str
    function: Function | None = None


class JsonSchema(Body):
    """A form of an answer."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """What an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Common(Sampling, Stored):
    """What chats and completions share."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1)
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool = False
    """Whether a stream tells how far its prompt is read, as llama.cpp's server does."""
    return_stats: bool = False
    """Whether an answer comes with its memory, reads, hits and stall."""


class ChatBody(Common):
    """Of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Common):
    """Of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None


CHAT_REFUSED: Mapping[str, str] = {
    "audio": "answers have no sound",
    "functions": "it was replaced by tools",
    "function_call": "it was replaced by tool_choice",
    "web_search_options": "nothing is searched on the web",
    "guided_json": "give response_format",
    "guided_regex": "give response_format with a JSON schema",
    "guided_choice": "give response_format with a JSON schema (enum)",
    "structured_outputs": "give response_format",
    "best_of": "give n",
    "prompt_logprobs": "the library has it (SamplingParams)",
}
"""Fields that would change the answer, and what to do instead."""
COMPLETION_REFUSED: Mapping[str, str] = {
    **CHAT_REFUSED, "suffix": "nothing is filled in between", "echo": "keep the prompt yourself",
}  # fmt: skip
RESPONSES_REFUSED: Mapping[str, str] = {
    "previous_response_id": "responses are not kept; send the whole input",
    "conversation": "conversations are not kept; send the whole input",
    "background": "responses are made while you wait",
    "prompt": "prompts are not kept; send input",
}


def refuse(body: BaseModel, names: Mapping[str, str]) -> None:
    """Refuse fields that would change what the answer is, where they ask for something.

    Raises:
        ApiError: names the first of them.
    """
    given = {**(body.model_extra or {}), **{n: getattr(body, n, None) for n in names}}
    for name, why in names.items():
        if not any(given.get(name) == nothing for nothing in _NOTHING):
            raise refused(f"{name} is not supported: {why}", name)
    modalities = given.get("modalities")
    if modalities not in (None, ["text"], []):
        raise refused("modalities: answers are text alone", "modalities")
