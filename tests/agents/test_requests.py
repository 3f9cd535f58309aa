"""Bodies of chat completions: what each becomes, and how the others are refused."""

import copy
import json
import random
from collections import Counter

import pytest

from grpo.agents.requests import ChatRequest, Refused, read_request

ASK = {"role": "user", "content": "what does tea cost?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": '{"item":  "tea"}'}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWER = {"role": "tool", "content": "3", "tool_call_id": "c1"}
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "price", "description": "a price", "parameters": SCHEMA}}
DEFAULTS = {
    **{"messages": [ASK], "tools": [], "n": 1, "stop": [], "max_tokens": None, "seed": None, "logprobs": False},
    "may_call": True,
    **{"stream": False, "include_usage": False, "temperature": None, "top_p": None},
}


def encoded(messages=(ASK,), **fields) -> bytes:
    return json.dumps({"model": "policy", "messages": messages, **fields}).encode()


def refusal_of(body: bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        read_request(body)
    return caught.value


def inside(depth: int) -> list:
    """Return so many lists within each other."""
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


def tool(**function) -> dict:
    return {"type": "function", "function": function}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


EMPTY = tool(name="f", parameters={"type": "object", "properties": {}})


def call(**changes) -> list[dict]:
    """Return messages with a call that is changed."""
    return [ASK, CALLS | {"tool_calls": [CALL | changes]}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"model": None, "n": None, "stop": None, "tools": None, "stream": None, "temperature": None}, {}),
        ({"n": 64, "seed": -(2**63), "logprobs": True}, {"n": 64, "seed": -(2**63), "logprobs": True}),
        ({"seed": 2**63 - 1, "n": 1}, {"seed": 2**63 - 1}),
        ({"stop": "\n"}, {"stop": ["\n"]}),
        ({"stop": ["a", "b", "c", " "]}, {"stop": ["a", "b", "c", " "]}),
        ({"stop": [], "tools": []}, {}),
        ({"max_tokens": 1}, {"max_tokens": 1}),
        ({"max_completion_tokens": 2**63 - 1}, {"max_tokens": 2**63 - 1}),
        ({"max_tokens": 7, "max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": 7, "max_completion_tokens": None}, {"max_tokens": 7}),
        ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": True, "include_usage": True}),
        ({"stream": True, "stream_options": {"include_usage": None}}, {"stream": True}),
        ({"stream_options": None}, {}),
        ({"temperature": 0.7, "top_p": 1}, {"temperature": 0.7, "top_p": 1}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "top_logprobs": 0}, {}),
        ({"response_format": {"type": "text"}, "tool_choice": "auto", "parallel_tool_calls": False}, {}),
        ({"tool_choice": "none", "tools": [TOOL]}, {"tools": [TOOL], "may_call": False}),
        ({"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex"}, {}),
        ({"prompt_cache_key": "k", "safety_identifier": "s", "functions": None, "modalities": None}, {}),
        ({"tools": [tool(name="f")]}, {"tools": [EMPTY]}),
        ({"tools": [tool(name="f", strict=True, parameters=SCHEMA)]}, {"tools": [tool(name="f", parameters=SCHEMA)]}),
        ({"tools": [tool(name="f", strict=None, description=None, parameters={}), TOOL]}, {"tools": [EMPTY, TOOL]}),
    ],
)
def test_fields_are_taken_over(fields, expected):
    assert vars(read_request(encoded(**fields))) == DEFAULTS | expected


# A chat template shows a tool's fields to the policy in their order.
def test_the_order_in_which_a_client_writes_a_tool_changes_nothing():
    turned = {"function": dict(reversed(TOOL["function"].items())), "type": "function"}
    assert json.dumps(read_request(encoded(tools=[turned])).tools) == json.dumps([TOOL])


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"role": "developer", "content": "be brief"}, {"role": "system", "content": "be brief"}),
        ({"role": "user", "content": "", "name": "eva"}, {"role": "user", "content": "", "name": "eva"}),
        ({"role": "user", "content": [text("a\n"), text(" b")]}, {"role": "user", "content": "a\n b"}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"role": "user", "content": "hi", "name": None, "foo": None}, {"role": "user", "content": "hi"}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": " \U0001f600\0\n", "reasoning_content": ""},) * 2,
        ({"role": "tool", "content": [text("3")], "tool_call_id": "c1"}, ANSWER),
        (ANSWER | {"name": "price"},) * 2,
        (CALLS | {"content": "I ask", "tool_calls": [CALL, CALL | {"id": "c2"}]},) * 2,
        *((call(function={"name": "price", "arguments": drawn})[1],) * 2 for drawn in ("", "{", "[1]", '"\\ud800"')),
    ],
)
def test_messages_get_one_form(sent, expected):
    assert read_request(encoded([ASK, sent])).messages == [ASK, expected]


# Each is what openai 3.57.0 sent when a message of its response, or the calls that a stream gave, went back.
NULLS = '"refusal":null,"role":"assistant","annotations":null,"audio":null,"function_call":null'
DRAWN = r'"arguments":"{\"item\":  \"tea\"}","name":"price"'


@pytest.mark.parametrize(
    "written",
    [
        '{"content":null,"role":"assistant","tool_calls":[{"id":"c1","function":{DRAWN},"type":"function"}]',
        '{"content":null,NULLS,"tool_calls":[{"id":"c1","function":{DRAWN},"type":"function"}]',
        '{"content":"",NULLS,"tool_calls":[{"id":"c1","function":{DRAWN,"parsed_arguments":null},"type":"function",'
        '"index":0}],"parsed":null',
        '{"content":null,"role":"assistant","tool_calls":[{"id":"c1","function":{DRAWN,"parsed_arguments":{"item":"tea"}},'
        '"type":"function"}],"parsed":null',
        '{"role":"assistant","content":"","tool_calls":[{"index":0,"id":"c1","function":{DRAWN},"type":"function"}]',
    ],
)
def test_an_answer_that_comes_back_through_the_openai_package_is_the_same_message(written):
    message = written.replace("NULLS", NULLS).replace("DRAWN", DRAWN) + ',"reasoning_content":"hm",'
    message += '"annotations":[],"provider_specific_fields":{"refusal":null}}'  # as litellm sends it back
    body = f'{{"model":"policy","messages":[{json.dumps(ASK)},{message},{json.dumps(ANSWER)}],"seed":null}}'
    assert read_request(body.encode()).messages == [ASK, CALLS | {"reasoning_content": "hm"}, ANSWER]


UNSUPPORTED, INVALID = "unsupported_parameter", "invalid_value"

WRONG_MESSAGES = [
    *((messages, "messages", INVALID) for messages in ([], None, {}, "hi", 5, ASK)),
    *(([ASK, message], "messages[1]", INVALID) for message in (None, "hi", [], 5, True)),
    *(([{"role": role}], "messages[0].role", INVALID) for role in ("function", None, [], {}, 1, "")),
    ([{"content": "a"}], "messages[0].role", INVALID),
    *(([{"role": "user", "content": content}], "messages[0].content", INVALID) for content in (None, 5, {}, False)),
    ([{"role": "system"}], "messages[0].content", INVALID),
    ([ASK, CALLS, {"role": "tool", "tool_call_id": "c1"}], "messages[2].content", INVALID),
    ([{"role": "assistant", "content": 0}], "messages[0].content", INVALID),
    ([ASK | {"content": ["a"]}], "messages[0].content[0]", INVALID),
    ([ASK | {"content": [{"text": "a"}]}], "messages[0].content[0].type", INVALID),
    ([ASK | {"content": [{"type": "text"}]}], "messages[0].content[0].text", INVALID),
    ([ASK | {"content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text", INVALID),
    ([ASK | {"content": [{"type": "text", "text": "", "cache": 1}]}], "messages[0].content[0].cache", UNSUPPORTED),
    ([ASK | {"content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type", UNSUPPORTED),
    ([ASK | {"name": 5}], "messages[0].name", INVALID),
    ([ASK] * 3 + [ASK | {"foo": 0}], "messages[3].foo", UNSUPPORTED),
    ([ASK | {"tool_calls": []}], "messages[0].tool_calls", UNSUPPORTED),
    ([CALLS | {"tool_call_id": "c1"}], "messages[0].tool_call_id", UNSUPPORTED),
    ([CALLS | {"refusal": "no"}], "messages[0].refusal", UNSUPPORTED),
    ([CALLS | {"reasoning_content": ["a"]}], "messages[0].reasoning_content", INVALID),
    ([{"role": "tool", "content": "3"}], "messages[0].tool_call_id", INVALID),
    ([ANSWER | {"tool_call_id": 1}], "messages[0].tool_call_id", INVALID),
    ([CALLS | {"tool_calls": CALL}], "messages[0].tool_calls", INVALID),
    ([CALLS | {"tool_calls": [None]}], "messages[0].tool_calls[0]", INVALID),
    (call(id=None), "messages[1].tool_calls[0].id", INVALID),
    (call(type="custom"), "messages[1].tool_calls[0].type", INVALID),
    (call(type=None), "messages[1].tool_calls[0].type", INVALID),
    (call(custom={}), "messages[1].tool_calls[0].custom", UNSUPPORTED),
    (call(function="price"), "messages[1].tool_calls[0].function", INVALID),
    (call(function=None), "messages[1].tool_calls[0].function", INVALID),
    (call(function={"arguments": ""}), "messages[1].tool_calls[0].function.name", INVALID),
    (call(function={"name": "f", "arguments": {}}), "messages[1].tool_calls[0].function.arguments", INVALID),
    (call(function={"name": "f"}), "messages[1].tool_calls[0].function.arguments", INVALID),
    (call(function=CALL["function"] | {"x": 1}), "messages[1].tool_calls[0].function.x", UNSUPPORTED),
    ([ASK | {"content": "\udc00"}], "messages", INVALID),
]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        *(({"n": n}, "n", INVALID) for n in (0, 65, -1, 1.0, "1", True, [], 10**400)),
        *(({"stop": stop}, "stop", INVALID) for stop in ("", ["a", ""], [*"abcde"], 1, [None], {"a": 1}, True)),
        *(({"max_tokens": most}, "max_tokens", INVALID) for most in (0, -1, 2.5, "5", True, 2**63)),
        ({"max_completion_tokens": 0}, "max_completion_tokens", INVALID),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", INVALID),
        *(({"seed": seed}, "seed", INVALID) for seed in (2**63, -(2**63) - 1, 0.5, False, "1")),
        *(({name: 1}, name, INVALID) for name in ("logprobs", "stream", "parallel_tool_calls", "model")),
        *(({name: value}, name, INVALID) for name in ("temperature", "top_p") for value in ("1", True, [1], 10**400)),
        ({"stream_options": True}, "stream_options", INVALID),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", INVALID),
        ({"stream_options": {"other": False}}, "stream_options.other", UNSUPPORTED),
        *(({name: 0.5}, name, UNSUPPORTED) for name in ("frequency_penalty", "presence_penalty", "logit_bias")),
        *(({name: False}, name, UNSUPPORTED) for name in ("frequency_penalty", "presence_penalty", "top_logprobs")),
        ({"top_logprobs": 5}, "top_logprobs", UNSUPPORTED),
        ({"logit_bias": {"50256": -100}}, "logit_bias", UNSUPPORTED),
        *(({"response_format": {"type": kind}}, "response_format", UNSUPPORTED) for kind in ("json_object", [], None)),
        *(({"tool_choice": way}, "tool_choice", UNSUPPORTED) for way in ("required", {"type": "function"}, [], 0)),
        *(({name: 5}, name, UNSUPPORTED) for name in ("top_k", "functions", "reasoning_effort", "n ")),
        ({"": 5}, None, UNSUPPORTED),
        ({"x" * 10**6: 5}, "x" * 60, UNSUPPORTED),
        ({"tools": {}}, "tools", INVALID),
        ({"tools": [TOOL, None]}, "tools[1]", INVALID),
        ({"tools": [[]]}, "tools[0]", INVALID),
        ({"tools": [TOOL | {"type": "custom"}]}, "tools[0].type", INVALID),
        ({"tools": [{"type": "function"}]}, "tools[0].function", INVALID),
        ({"tools": [TOOL | {"name": "f"}]}, "tools[0].name", UNSUPPORTED),
        *(
            ({"tools": [TOOL, tool(name=name)]}, "tools[1].function.name", INVALID)
            for name in ("price", "", None, 1, [])
        ),
        ({"tools": [tool(name="f", description=5)]}, "tools[0].function.description", INVALID),
        ({"tools": [tool(name="f", parameters=[])]}, "tools[0].function.parameters", INVALID),
        ({"tools": [tool(name="f", strict="yes")]}, "tools[0].function.strict", INVALID),
        ({"tools": [tool(name="f", result={})]}, "tools[0].function.result", UNSUPPORTED),
        ({"user": float("nan")}, "user", INVALID),
        ({"metadata": {"a": [float("-inf")]}}, "metadata", INVALID),
        ({"user": "\ud800"}, "user", INVALID),
        ({"tools": [tool(name="f", parameters={"\udfff": 1})]}, "tools", INVALID),
        ({"\ud800": 1}, None, INVALID),
        *(({"messages": messages}, param, code) for messages, param, code in WRONG_MESSAGES),
    ],
)
def test_a_wrong_field_is_refused_by_its_place(fields, param, code):
    refusal = refusal_of(encoded(**fields))
    assert (refusal.status, refusal.param, refusal.code) == (400, param, code)
    check_form(refusal)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"null", b"[]", b'"text"', b"5", b"NaN", b"\xff\xfe{}", b"\xef\xbb\xbf" + encoded(), b"[" * 10**5),
        *(encoded().decode().encode("utf-16"), encoded() + b"x", b'{"n": %b}' % (b"9" * 5000), b'"\\ud800"'),
        *(b'{"a":' * 10**5, encoded().replace(b"tea", b"\xed\xa0\x80")),
    ],
)
def test_what_is_no_object_of_json_is_refused(body):
    refusal = refusal_of(body)
    assert refusal.param is None and refusal.message.startswith("the body: ")
    check_form(refusal)


def test_a_refusal_says_field_fault_and_remedy():
    assert refusal_of(encoded(n=65)).message == "n: '65' is not allowed: send a whole number from 1 to 64"
    assert refusal_of(encoded(top_k=5)).message == "top_k: this field is not known here: leave it out"
    assert refusal_of(b"{}").message == "messages: no message was sent: send a list of at least one message"
    forced = "tool_choice: 'required' is not supported, the policy draws freely: leave it out"
    assert refusal_of(encoded(tool_choice="required")).message == forced
    picture = [ASK | {"content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]
    remedy = "a part of type 'image_url' is not read: send text: pictures are not drawn from here"
    assert refusal_of(encoded(picture)).message == f"messages[0].content[0].type: {remedy}"
    assert len(refusal_of(encoded(n="x" * 10**6)).message) < 200


def test_a_field_that_stands_twice_has_its_last_value():
    assert read_request(encoded().removesuffix(b"}") + b', "n": 2, "n": 3}').n == 3


# Reward functions get copies of messages, and Python copies no value of any depth.
def test_depth_is_limited():
    assert read_request(encoded(tools=[tool(name="f", parameters={"enum": inside(50)})])).tools
    assert read_request(encoded(metadata=inside(55)))
    refusal = refusal_of(encoded(metadata=inside(56)))
    assert refusal.param == "metadata" and "more than 55 lists and objects within each other" in refusal.message


def check_form(refusal: Refused) -> None:
    """Hold a refusal against the form that a client reads."""
    error = json.loads(refusal.to_json().decode())["error"]
    assert error.pop("type") == "invalid_request_error"
    assert error == {"message": refusal.message, "param": refusal.param, "code": refusal.code}
    assert 20 < len(refusal.message.encode()) < 500 and refusal.message.count(": ") >= 2
    assert refusal.param is None or (refusal.message.startswith(f"{refusal.param}: "))


def check_request(request: ChatRequest) -> None:
    """Hold a request against its description: what is made of it later checks nothing again."""
    for message in request.messages:
        texts = {name: value for name, value in message.items() if name != "tool_calls"}
        assert texts.keys() <= {"role", "content", "name", "tool_call_id", "reasoning_content"}
        assert {type(value) for value in texts.values()} == {str} and "content" in texts
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert ("tool_call_id" in message) == (message["role"] == "tool")
        for each in message.get("tool_calls", []):
            assert each.keys() == {"id", "type", "function"} and each["function"].keys() == {"name", "arguments"}
            assert {type(value) for value in (each["id"], *each["function"].values())} == {str}
    for each in request.tools:
        assert each.keys() == {"type", "function"} and isinstance(each["function"]["parameters"], dict)
        assert each["function"]["name"] and isinstance(each["function"].get("description", ""), str)
    assert len({each["function"]["name"] for each in request.tools}) == len(request.tools)
    assert request.messages and type(request.n) is int and 1 <= request.n <= 64
    assert len(request.stop) <= 4 and all(isinstance(stop, str) and stop for stop in request.stop)
    assert all(isinstance(flag, bool) for flag in (request.logprobs, request.stream, request.include_usage))
    assert request.max_tokens is None or (type(request.max_tokens) is int and request.max_tokens > 0)
    assert request.seed is None or (type(request.seed) is int and -(2**63) <= request.seed < 2**63)
    assert all(type(number) in (type(None), int, float) for number in (request.temperature, request.top_p))
    json.dumps(vars(request), ensure_ascii=False, allow_nan=False).encode()
    copy.deepcopy(request)


VALID = [
    {
        **{"model": "policy", "messages": [{"role": "system", "content": "s"}, ASK, CALLS, ANSWER], "tools": [TOOL]},
        **{"n": 2, "stop": ["x", "y"], "max_tokens": 5, "seed": 1, "logprobs": True, "temperature": 1.0, "top_p": 1},
        **{"stream": True, "stream_options": {"include_usage": True}, "tool_choice": "auto", "user": "u"},
    },
    {
        "messages": [
            {"role": "developer", "content": [text("a"), text("b")]},
            ASK | {"name": "eva"},
            CALLS | {"content": None, "refusal": None, "reasoning_content": "hm", "tool_calls": [CALL] * 2},
            ANSWER | {"name": "price"},
        ],
        "tools": [TOOL, tool(name="f", strict=True)],
        **{"max_completion_tokens": 9, "response_format": {"type": "text"}, "logit_bias": {}, "metadata": {"a": "b"}},
        **{"frequency_penalty": 0, "presence_penalty": 0.0, "top_logprobs": 0, "parallel_tool_calls": True},
    },
]
ODD = [None, True, False, -1, 0, 1, 3, 64, 65, 1.5, -0.5, 1e300, 2**63, 10**400, -(10**4000)]
ODD += [float("nan"), float("inf")]
ODD += ["", "x", "x" * 1000, "\ud800", "\0", "user", "tool", "assistant", "text", "function", "auto", "é\U0001f600"]
ODD += [[], {}, [[]], [{}], [None], ["a"], [""], [1], {"": ""}, {"a": 1}, {"type": "text"}, {"\udfff": 1}]
ODD += [inside(50), inside(80), [ASK], ASK, CALLS, ANSWER, TOOL, CALL, ["a"] * 5]


def places(value, path=()):
    """List the path of each value in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(*path, name) for name, _ in inner] + [deep for name, item in inner for deep in places(item, (*path, name))]


def damaged(draw: random.Random) -> bytes:
    """Return a valid body that was changed in one to three places, and perhaps cut or changed in a byte."""
    body = copy.deepcopy(draw.choice(VALID))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        path = draw.choice(places(body) or [("n",)])
        holder = body
        for name in path[:-1]:
            holder = holder[name]
        change = draw.randrange(5)
        if change == 0:
            del holder[path[-1]]
        elif change == 1 and isinstance(holder, dict):
            holder[draw.choice(["unknown", "", "\ud800", "x" * 500, "a: b", *holder])] = holder.pop(path[-1])
        elif change == 2 and isinstance(holder, list):
            holder.insert(path[-1], draw.choice(ODD))
        else:
            holder[path[-1]] = copy.deepcopy(draw.choice(ODD))
    written = bytearray(json.dumps(body, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass"))
    if draw.random() < 0.2:
        place = draw.randrange(len(written))
        if draw.random() < 0.3:
            del written[place:]
        else:
            written[place] = draw.randrange(256)
    return bytes(written)


def test_every_damaged_body_is_a_request_or_refused():
    draw, counts = random.Random(0), Counter()
    for _ in range(5000):
        body = damaged(draw)
        try:
            request = read_request(body)
        except Refused as refusal:
            counts["refused"] += 1
            check_form(refusal)
        else:
            counts["read"] += 1
            check_request(request)
    assert min(counts["refused"], counts["read"]) > 500, counts
