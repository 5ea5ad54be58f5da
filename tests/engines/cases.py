"""Requests that are sent to a real engine and to a simulated one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

Json = Any


@dataclass(frozen=True)
class Case:
    """One request. `body` is sent as JSON; `raw` as it is."""

    name: str
    method: str
    path: str
    body: Json = None
    raw: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.name


MODEL = "smollm2"
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
INVOCATION = "/invocations"
FRANCE = "What is the capital of France?"
USAGE = {"include_usage": True}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
OTHER_TOOL = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "f"}}

WRONG_IN_CHATS: list[tuple[str, Json]] = [
    ("n", -1),
    ("n", 2),  # greedy
    ("n", 10**6),
    ("n", 1.5),
    ("echo", None),
    ("logprobs", "x"),
    ("top_logprobs", -2),
    ("top_logprobs", "x"),
    ("prompt_logprobs", "x"),
    ("prompt_logprobs", 99),
    ("stop", 5),
    ("stop", [5]),
    ("stop", ""),
    ("stop", ["a"] * 5),
    ("stop_token_ids", 5),
    ("stop_token_ids", [-1]),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("seed", 2**63),
    ("temperature", 3),
    ("temperature", []),
    ("top_k", -2),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"99999999": 1}),
    ("logit_bias", []),
    ("allowed_token_ids", []),
    ("bad_words", [""]),
    ("stream", "x"),
    ("user", 7),
    ("ignore_eos", "zork"),
    ("priority", None),
    ("request_id", 7),
    ("kv_transfer_params", ["a"]),
    ("vllm_xargs", 7),
    ("cache_salt", "a@b"),
    ("truncate_prompt_tokens", -7),
    ("response_format", {}),
    ("response_format", 7),
    ("response_format", {"type": "json_schema"}),
    ("reasoning_effort", "zork"),
    ("chat_template", "x"),
    ("continue_final_message", True),
    ("documents", ["a"]),
]
WRONG_IN_COMPLETIONS: list[tuple[str, Json]] = [
    ("n", None),
    ("n", 2),
    ("logprobs", "3"),
    ("logprobs", -1),
    ("suffix", "x"),
    ("prompt_embeds", "x"),
    ("max_tokens", 10**12),
    ("add_special_tokens", "zork"),
    ("stream_options", []),
]
WRONG_PROMPTS: list[Json] = [
    *(5, {}, [5, "a"], [[5], "a"], [None], [-1], [1.5], [[]], ["a", ""], ["", ""], [49_152], [[5], [49_152]]),
]
WRONG_MESSAGES: dict[str, Json] = {
    "a message without a role": [{"content": "x"}],
    "a message that is a text": ["x"],
    "null for content": [{"role": "user", "content": None}],
    "a number for content": [{"role": "user", "content": 5}],
    "a text for a part": [{"role": "user", "content": ["x"]}],
    "an unknown part": [{"role": "user", "content": [{"type": "zork"}]}],
    "half a character": [{"role": "user", "content": "\ud800"}],
    "an image": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x.invalid/x"}}]}
    ],
}


def chat(text: str = FRANCE, **more: Json) -> Json:
    """Its answer is always of `max_tokens` tokens, whatever the model makes of the text."""
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, **_SHORT, **more}


def completion(prompt: Json = "The capital of France is", **more: Json) -> Json:
    return {"model": MODEL, "prompt": prompt, **_SHORT, **more}


def talk(messages: Json) -> Json:
    return {**chat(), "messages": messages}


_SHORT = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
_TEXT = (("content-type", "text/plain"),)
_ADAPTER = "x-amzn-sagemaker-adapter-identifier"
_SESSION = "x-amzn-sagemaker-session-id"

INVOCATIONS: dict[str, Json] = {
    "a chat": chat(),
    "a chat stream": chat(stream=True),
    "a completion": completion(),
    "a completion stream": completion(stream=True, stream_options=USAGE),
    "a list of prompts": completion(["a b", "c d"]),
    "messages and a prompt": chat(prompt="a"),
    "no model named": {"prompt": "a", **_SHORT},
    "a model that is not there": chat(model="nope"),
    "a number for a model": completion(model=5),
    "a message without a role": {"messages": [{"content": "x"}]},
    "a message without a role, and a prompt": completion(messages=[{"content": "x"}]),
    "a text for messages": {"messages": "x"},
    "a text for messages, and a prompt": completion(messages="x"),
    "null for messages": {"messages": None},
    "null for messages, and a prompt": completion(messages=None),
    "no messages": talk([]),
    "no messages, and a prompt": completion(messages=[]),
    "a list for a temperature": chat(temperature=[]),
    "a list for a temperature, and a prompt": chat(temperature=[], prompt="a"),
    "top_p above 1": chat(top_p=2),
    "a template": chat(chat_template="x"),
    "no tools": chat(tools=[]),
    "an empty prompt": completion(""),
    "null for a prompt": completion(None),
    "a number for a prompt": completion(5),
    "embeddings for a prompt": {"prompt_embeds": "x"},
    "a text to embed": {"model": MODEL, "input": "x"},
    "nothing": {},
    "a new session": {"requestType": "NEW_SESSION"},
    "an end of a session": {"requestType": "CLOSE"},
    "an unknown kind of session": {"requestType": "zork"},
    "a session and a prompt": completion(requestType="NEW_SESSION"),
}

CASES = [
    Case("health", "GET", "/health"),
    Case("ping", "GET", "/ping"),
    Case("version", "GET", "/version"),
    Case("models", "GET", "/v1/models"),
    Case("metrics", "GET", "/metrics"),
    Case("load", "GET", "/load"),
    Case("event sources", "GET", "/kv_event_sources"),
    Case("health, only the head", "HEAD", "/health"),
    Case("a slash too many", "GET", "/v1/models/?x=1"),
    Case("no such path", "GET", "/nope"),
    Case("no such path, POST", "POST", "/nope", {}),
    Case("wrong method", "GET", CHAT),
    Case("wrong method, other way round", "POST", "/health", {}),
    Case("wrong method, OPTIONS", "OPTIONS", COMPLETION),
    Case("tokenize a text", "POST", "/tokenize", {"model": MODEL, "prompt": "Hello there"}),
    Case("tokenize a chat", "POST", "/tokenize", {**chat(), "return_token_strs": True}),
    Case("tokenize, wrong model", "POST", "/tokenize", {"model": "nope", "prompt": "Hello"}),
    Case("tokenize nothing", "POST", "/tokenize", {}),
    Case("tokenize an empty text", "POST", "/tokenize", {"prompt": ""}),
    Case("tokenize ids", "POST", "/tokenize", {"prompt": [5]}),
    Case("tokenize a text and a chat", "POST", "/tokenize", {"prompt": "x", "messages": []}),
    Case("tokenize, a number for a model", "POST", "/tokenize", {"prompt": "x", "model": 5}),
    Case("tokenize a list", "POST", "/tokenize", raw="[]"),
    Case("detokenize", "POST", "/detokenize", {"model": MODEL, "tokens": [19556, 665]}),
    Case("detokenize nothing", "POST", "/detokenize", {}),
    Case("detokenize ids outside of the vocabulary", "POST", "/detokenize", {"tokens": [5, 10**9]}),
    Case("detokenize a negative id", "POST", "/detokenize", {"tokens": [-1]}),
    Case("detokenize words", "POST", "/detokenize", {"tokens": ["5", "x"]}),
    Case("chat", "POST", CHAT, chat()),
    Case("chat, own request id", "POST", CHAT, chat(), headers=(("x-request-id", "abc-1"),)),
    Case("chat, two choices", "POST", CHAT, chat(n=2, temperature=1)),
    Case("chat, log probabilities", "POST", CHAT, chat(logprobs=True, top_logprobs=2)),
    Case("chat, token ids", "POST", CHAT, chat(return_token_ids=True)),
    Case("chat, no model named", "POST", CHAT, {k: v for k, v in chat().items() if k != "model"}),
    Case("chat, newer length field", "POST", CHAT, chat(max_tokens=9, max_completion_tokens=2)),
    Case("chat, null fields", "POST", CHAT, chat(n=None, stop=None, stream=None)),
    Case("chat, unknown field", "POST", CHAT, chat(zork=1)),
    Case("chat stream", "POST", CHAT, chat(stream=True)),
    Case("chat stream, usage", "POST", CHAT, chat(stream=True, stream_options=USAGE)),
    Case("chat stream, usage throughout", "POST", CHAT, chat(stream=True, stream_options=CONTINUOUS)),
    Case("chat stream, log probabilities", "POST", CHAT, chat(stream=True, logprobs=True, top_logprobs=1)),
    Case("completion", "POST", COMPLETION, completion()),
    Case(
        "completion, default length", "POST", COMPLETION, {"model": MODEL, "prompt": "a", "ignore_eos": True}
    ),
    Case("completion of ids", "POST", COMPLETION, completion([504, 3575, 282], return_token_ids=True)),
    Case("completions of a list", "POST", COMPLETION, completion(["a b", "c d"])),
    Case("completion, log probabilities", "POST", COMPLETION, completion(logprobs=2)),
    Case("completion, echo", "POST", COMPLETION, completion(echo=True)),
    Case("completion stream, usage", "POST", COMPLETION, completion(stream=True, stream_options=USAGE)),
    Case(
        "completion stream, ids and log probabilities",
        "POST",
        COMPLETION,
        completion(stream=True, return_token_ids=True, logprobs=1),
    ),
    Case("completion, echo alone", "POST", COMPLETION, completion(echo=True, max_tokens=0)),
    Case("completion stream, echo", "POST", COMPLETION, completion(stream=True, echo=True)),
    Case("completion, other scripts", "POST", COMPLETION, completion("日本語 🎉 ﷽ \0")),
    Case("completion, a length as text", "POST", COMPLETION, completion(max_tokens="3")),
    Case("completion, no length", "POST", COMPLETION, completion(max_tokens=None)),
    Case("completion, true for a token", "POST", COMPLETION, completion([True, 5])),
    Case("chat, parts", "POST", CHAT, talk([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])),
    Case("chat, the assistant last", "POST", CHAT, talk([{"role": "assistant", "content": "Yes"}])),
    Case("chat, no content", "POST", CHAT, talk([{"role": "assistant"}, {"role": "user"}])),
    Case("chat, other roles", "POST", CHAT, talk([{"role": "zork", "content": "Hi", "name": "x"}])),
    Case("chat, tools not to be used", "POST", CHAT, chat(tools=[TOOL], tool_choice="none")),
    Case("chat, text wanted", "POST", CHAT, chat(response_format={"type": "text"})),
    Case("chat, numbers as text", "POST", CHAT, chat(n="1", temperature="0.5", seed="7", logprobs="true")),
    Case("chat, own request id in the body", "POST", CHAT, chat(request_id="abc-2")),
    Case("wrong model", "POST", CHAT, chat(model="nope")),
    Case("wrong model, stream", "POST", CHAT, chat(model="nope", stream=True)),
    Case("a number for a model", "POST", CHAT, chat(model=5)),
    Case("half an object", "POST", CHAT, raw='{"model": '),
    Case("no body", "POST", CHAT, raw=""),
    Case("a list for a body", "POST", CHAT, raw="[1]"),
    Case("null for a body", "POST", COMPLETION, raw="null"),
    Case("after the object", "POST", CHAT, raw="{}x"),
    Case("not said to be JSON", "POST", CHAT, raw=json.dumps(chat()), headers=_TEXT),
    Case("no messages", "POST", CHAT, {"model": MODEL}),
    Case("no prompt", "POST", COMPLETION, {"model": MODEL}),
    Case("empty prompt", "POST", COMPLETION, completion("")),
    Case("empty list", "POST", COMPLETION, completion([])),
    Case("token id out of range", "POST", COMPLETION, completion([99_999_999])),
    Case("a word for a length", "POST", CHAT, chat(max_tokens="zz")),
    Case("no tokens wanted", "POST", CHAT, chat(max_tokens=0)),
    Case("more tokens than the context", "POST", CHAT, chat(max_tokens=50_000)),
    Case("prompt longer than the context", "POST", COMPLETION, completion("a " * 9_000)),
    Case("negative temperature", "POST", CHAT, chat(temperature=-1)),
    Case("top_p above 1", "POST", CHAT, chat(top_p=2)),
    Case("no choices wanted", "POST", CHAT, chat(n=0)),
    Case("too many log probabilities", "POST", CHAT, chat(logprobs=True, top_logprobs=99)),
    Case("top_logprobs alone", "POST", CHAT, chat(top_logprobs=2)),
    Case("least above most", "POST", CHAT, chat(min_tokens=9)),
    Case("stream options without a stream", "POST", CHAT, chat(stream_options=USAGE)),
    Case("empty cache salt", "POST", COMPLETION, completion(cache_salt="")),
    Case("tools without a parser", "POST", CHAT, chat(tools=[TOOL], tool_choice="auto")),
    Case("a tool without a parser", "POST", CHAT, chat(tools=[TOOL], tool_choice=NAMED)),
    Case("a tool that is not there", "POST", CHAT, chat(tools=[OTHER_TOOL], tool_choice=NAMED)),
    Case("a choice without tools", "POST", CHAT, chat(tool_choice="required")),
    Case("an unknown choice", "POST", CHAT, chat(tools=[TOOL], tool_choice="zork")),
    Case("no tools", "POST", CHAT, chat(tools=[])),
    Case("a tool without a name", "POST", CHAT, chat(tools=[{"type": "function", "function": {}}])),
    *(Case(f"{name}: {value!r}", "POST", CHAT, chat(**{name: value})) for name, value in WRONG_IN_CHATS),
    *(Case(f"{n}: {v!r}, text", "POST", COMPLETION, completion(**{n: v})) for n, v in WRONG_IN_COMPLETIONS),
    *(
        Case(
            f"prompt: {prompt!r}{', stream' * stream}", "POST", COMPLETION, completion(prompt, stream=stream)
        )
        for prompt in WRONG_PROMPTS
        for stream in (False, True)
    ),
    Case("ids longer than the context", "POST", COMPLETION, completion([5] * 9_000)),
    Case("ids longer than the context by one", "POST", COMPLETION, completion([5] * 8_193)),
    Case("texts, one longer than the context", "POST", COMPLETION, completion(["a " * 9_000, "b"])),
    *(Case(f"messages: {value!r}", "POST", CHAT, {**chat(), "messages": value}) for value in (None, 5, "x")),
    *(Case(f"invocation: {name}", "POST", INVOCATION, body) for name, body in INVOCATIONS.items()),
    *(
        Case(f"invocation of the adapter {name!r}", "POST", INVOCATION, chat(), headers=((_ADAPTER, name),))
        for name in (MODEL, "nope", "")
    ),
    *(
        Case(
            f"invocation in the session {name!r}",
            "POST",
            INVOCATION,
            completion(),
            headers=((_SESSION, name),),
        )
        for name in ("x", "")
    ),
    *(
        Case(f"invocation, raw: {raw!r}", "POST", INVOCATION, raw=raw)
        for raw in ("", '{"a": ', "{}x", "[]", "null", "5", "1.5", "true", '"x"', '"requestType"')
    ),
    Case("invocation, not said to be JSON", "POST", INVOCATION, raw="{}", headers=_TEXT),
    Case(
        "invocation, own request id", "POST", INVOCATION, completion(), headers=(("x-request-id", "abc-3"),)
    ),
    Case("invocation, wrong method", "GET", INVOCATION),
    Case("ping, only the head", "HEAD", "/ping"),
    Case("ping, by POST", "POST", "/ping", {}),
    *(
        Case(f"within a message: {name}", "POST", CHAT, talk(messages))
        for name, messages in WRONG_MESSAGES.items()
    ),
]


async def send(client: httpx.AsyncClient, engine: str, case: Case) -> httpx.Response:
    """Send a case to an engine, by its URL."""
    content = None if case.body is None else json.dumps(case.body)
    headers = {"content-type": "application/json", **dict(case.headers)}
    return await client.request(
        case.method,
        engine + case.path,
        content=content if case.raw is None else case.raw,
        headers=headers if case.method == "POST" else None,
    )
