"""What is read of a turn: in every format, well formed or not, and whether the arguments fit."""

import json

import pytest
from talks import TEMPLATES, Talks, call, ids_of, talker

from grpo.config.errors import ConfigError
from grpo.tools.schema import load_tools
from grpo.tools.turn_text import Call, TurnReader

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
    },
}
# As TRL has it for Qwen3.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def read(
    text: str, template: str = "qwen2", parser: str = "auto", before: str = "<|im_start|>assistant\n", **attributes
):
    tokenizer = talker(template)
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    reader = TurnReader(tokenizer, [tokenizer.eos_token_id], [SCHEMA], parser)
    return reader.read(ids_of(tokenizer, text), ids_of(tokenizer, before, ends=False))


ADD = Call("add", {"a": 1, "note": "x"})
ADD_JSON = '{"name": "add", "arguments": {"a": 1, "note": "x"}}'
IN_TEXT = json.dumps({"name": "add", "arguments": json.dumps(ADD.arguments)})
LLAMA_JSON = ADD_JSON.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        ("qwen2", f"I add.\n<tool_call>\n{ADD_JSON}\n</tool_call>", "I add.", [ADD]),
        ("qwen2", f"<tool_call>{ADD_JSON}</tool_call>\n<tool_call>{ADD_JSON}</tool_call>", "", [ADD, ADD]),
        ("qwen2", f"<think>or <tool_call>{ADD_JSON}</tool_call>?</think>no", None, []),
        ("qwen2", f"<think>so</think><tool_call>{ADD_JSON}</tool_call>", "<think>so</think>", [ADD]),
        ("qwen2", '<tool_call>{"name": "add"}</tool_call>', "", [Call("add", {})]),
        ("qwen2", f"<tool_call>{IN_TEXT}</tool_call>", "", [ADD]),
        ("qwen2", "the answer is 3", None, []),
        ("llama", LLAMA_JSON, "", [ADD]),
        ("llama", f"<|python_tag|>{LLAMA_JSON}; {LLAMA_JSON}", "", [ADD, ADD]),
        ("llama", LLAMA_JSON.replace("{", '{"type": "function", ', 1), "", [ADD]),
        ("llama", '{"answer": 3}', None, []),
        ("llama", f"I would say {LLAMA_JSON}", None, []),
        ("mistral", f"[TOOL_CALLS] [{ADD_JSON}, {ADD_JSON}]", "", [ADD, ADD]),
        ("mistral", f"Let me see.[TOOL_CALLS] [{ADD_JSON}]", "Let me see.", [ADD]),
        ("mistral", "the answer is 3", None, []),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_format_of_the_template(template, text, content, calls):
    turn = read(text, template)
    assert turn.calls == calls
    # Without a call it is the text without special tokens.
    assert turn.content == (text if content is None else content)
    message = turn.to_message()
    assert [c["function"]["arguments"] for c in message.get("tool_calls", [])] == [c.arguments for c in calls]


@pytest.mark.parametrize(
    ("template", "text", "error"),
    [
        ("qwen2", '<tool_call>{"name": "add", "argum</tool_call>', "not JSON"),
        ("qwen2", f"<tool_call>{ADD_JSON}", "no </tool_call>"),
        ("qwen2", "<tool_call>3</tool_call>", "a call is an object"),
        ("qwen2", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "a call is an object"),
        ("qwen2", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "no object"),
        ("qwen2", '<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "arguments are not JSON"),
        ("qwen2", r'<tool_call>{"name": "add", "arguments": {"a": "\ud800"}}</tool_call>', "surrogate"),
        ("qwen2", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN"),
        ("qwen2", f"<tool_call>{'[' * 100_000}</tool_call>", "not JSON"),
        ("qwen2", f'<tool_call>{{"name": "a", "arguments": {{"a": {"[" * 60}{"]" * 60}}}}}</tool_call>', "than 51"),
        ("llama", '{"name": "add", "parameters": ' + "[" * 100_000, "not JSON"),
        ("llama", '{"name": "add", "parameters": {', "not JSON"),
        ("llama", "<|python_tag|>print(3)", "not JSON"),
        ("mistral", "[TOOL_CALLS] [", "not JSON"),
        ("mistral", "[TOOL_CALLS] [[]]", "a call is an object"),
    ],
)
def test_a_malformed_call_is_a_call_with_an_error(template, text, error):
    turn = read(text, template)
    assert [error in c.error for c in turn.calls] == [True]
    assert "tool_calls" not in turn.to_message()
    assert turn.content == text
    if template == "qwen2" and text.endswith("</tool_call>"):
        beside = read(text + call("add", **ADD.arguments))
        assert [bool(c.error) for c in beside.calls] == [True, False] and beside.calls[1] == ADD
        assert beside.content == text


THOUGHT_OF = f"or <tool_call>{ADD_JSON}</tool_call>?"
QUOTED = call("add", note="a </think> b")


@pytest.mark.parametrize(
    ("begun", "text", "calls"),
    [
        *[("", QUOTED, 1), ("", QUOTED * 2, 2), ("", f"Quote it: {QUOTED}", 1)],
        ("", f"\n<think>so</think>{QUOTED}", 1),
        *[("", f"<think>{THOUGHT_OF}</think>no", 0), ("", f"<think>{THOUGHT_OF}</think>{QUOTED}", 1)],
        *[("<think>\n", f"{THOUGHT_OF}</think>no", 0), ("<think>\n", f"{THOUGHT_OF}</think>{QUOTED}", 1)],
        *[("<think>\n", f"so</think>{QUOTED}", 1), ("<think>\n\n</think>\n\n", QUOTED, 1)],
        # A model that begins its thought without the tag.
        ("", f"so</think>{QUOTED}", 1),
    ],
)
def test_reasoning_ends_at_its_own_end_and_not_within_a_call(begun, text, calls):
    turn = read(text, before="<|im_start|>assistant\n" + begun)
    assert [c.error for c in turn.calls] == [""] * calls
    assert turn.calls == [Call("add", {"note": "a </think> b"})] * calls
    expected = text.replace(QUOTED, "")
    assert turn.content == (expected.strip() if calls else expected)


def test_a_response_template_comes_before_the_formats():
    read_so = lambda text, **more: read(text, response_template=RESPONSE_TEMPLATE, **more)  # noqa: E731
    turn = read_so(f"<think>\nso\n</think>\n\n<tool_call>\n{ADD_JSON}\n</tool_call>")
    assert (turn.calls, turn.content, turn.reasoning.strip()) == ([ADD], "", "so")
    # The prompt has begun the thought.
    turn = read_so(f"so</think>3 <tool_call>{ADD_JSON}</tool_call>", before="<|im_start|>assistant\n<think>\n")
    assert turn.calls == [ADD] and turn.reasoning.strip() == "so"
    assert turn.to_message()["reasoning_content"].strip() == "so"
    assert read_so("the answer is 3").to_message() == {"role": "assistant", "content": "the answer is 3"}
    for text in ('<tool_call>{"name": "add", "ar</tool_call>', f"<tool_call>{ADD_JSON}", "<tool_call>3</tool_call>"):
        assert [bool(c.error) for c in read_so(text).calls] == [True]
    # Another format's template does not matter, nor does the setting.
    assert read_so(f"<tool_call>{ADD_JSON}</tool_call>", template="demo", parser="mistral").calls == [ADD]


def test_another_end_than_a_response_template_has_is_no_text():
    tokenizer = talker("qwen2")
    tokenizer.response_template = RESPONSE_TEMPLATE
    end = tokenizer.convert_tokens_to_ids("<|begin|>")
    reader = TurnReader(tokenizer, [tokenizer.eos_token_id, end], [SCHEMA], "auto")
    before = ids_of(tokenizer, "<|im_start|>assistant\n", ends=False)
    cases = ("3", "3", ""), ("<think>so<|im_start|></think>3", "3", "so"), ("<think>so", "", "so")
    for text, content, reasoning in cases:
        turn = reader.read([*ids_of(tokenizer, text, ends=False), end], before)
        assert (turn.content, turn.reasoning) == (content, reasoning)


# As newer ones of Mistral's; and one that writes arguments as Python does, which is no JSON.
_NEWER = TEMPLATES["mistral"].replace(
    "c.function | tojson", "c.function.name + '[ARGS]' + (c.function.arguments | tojson)"
)
NEWER_MISTRAL = _NEWER.replace("'[TOOL_CALLS] ['", "'[TOOL_CALLS]'").replace("']<|im_end|>'", "'<|im_end|>'")
NO_JSON = TEMPLATES["qwen2"].replace("c.function.arguments | tojson", "c.function.arguments.items() | list")


def test_a_format_can_be_named_and_must_be_where_none_reads_the_templates_own_calls():
    refusing = TEMPLATES["mistral"].replace("c.id | length != 9", "true")
    without = "gemma", "<tool_call><function={{ name }}>", "<tool_call>{{ name }}<arg_key>"
    reason = "writes calls in no known format: set it to one of hermes, llama3_json, mistral"
    for template in (*without, NEWER_MISTRAL, NO_JSON, refusing):
        with pytest.raises(ConfigError, match=f"tool_call_parser='auto': .* {reason}"):
            read("x", template)
    assert read(f"<tool_call>{ADD_JSON}</tool_call>", "gemma", "hermes").calls == [ADD]
    assert read(f"[TOOL_CALLS] [{ADD_JSON}]", NEWER_MISTRAL, "mistral").calls == [ADD]
    # Templates that take arguments as text, and messages in parts.
    for written in ("'' + c.function.arguments", "c.function.arguments", "c.function.arguments | string"):
        template = TEMPLATES["qwen2"].replace("c.function.arguments | tojson", written)
        assert read(call("add", a=1, note="x"), template).calls == [ADD]
    in_parts = TEMPLATES["qwen2"].replace("m.content }}", "(m.content | map(attribute='text') | join) }}")
    assert read(call("add", a=1, note="x"), in_parts).calls == [ADD]


def test_a_format_that_the_template_does_not_write_is_used_and_said(caplog):
    for template, parser in (("qwen2", "hermes"), ("qwen2", "auto"), ("gemma", "mistral")):
        read("x", template, parser)
    assert not caplog.records
    assert read(f"[TOOL_CALLS] [{ADD_JSON}]", "qwen2", "mistral").calls == [ADD]
    (record,) = caplog.records
    assert "tool_call_parser='mistral': the chat template writes calls as hermes does" in record.getMessage()


CODE = '''
from typing import Literal

def add(a: int, b: float = 0.5, note: str | None = None) -> float:
    """Add two numbers.

    Args:
        a: the first
        b: the second
        note: what for"""
    return a + b

def choose(what: Literal["red", "blue"], sizes: list[int], yes: bool, more: dict) -> str:
    """Choose.

    Args:
        what: a colour
        sizes: some
        yes: whether
        more: anything"""
    return what

def now() -> str:
    """Tell the time."""
    return "noon"

def unhinted(a):
    """Do.

    Args:
        a: it"""

def undocumented(a: int): pass

def half(a: int, b: int): pass
half.__doc__ = unhinted.__doc__

def many(*numbers: int): pass
def named(**numbers: int): pass
many.__doc__ = named.__doc__ = unhinted.__doc__.replace("a:", "numbers:")

def placed(a: int, /): pass
placed.__doc__ = unhinted.__doc__

class Kind:
    """Be."""

class Doer:
    """Do."""
    def __call__(self):
        pass

doer = Doer()
'''


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    file = tmp_path_factory.mktemp("tools") / "tools.py"
    file.write_text(CODE)
    return load_tools([f"{file}:{n}" for n in ("add", "choose", "now")])


@pytest.mark.parametrize(
    ("name", "arguments", "misfit"),
    [
        *[("add", {"a": 1}, ""), ("add", {"a": 1, "b": 2}, ""), ("add", {"a": 1, "b": 2.5, "note": None}, "")],
        *[("add", {"a": 1, "note": "x"}, ""), ("add", {}, "missing a required argument: 'a'")],
        *[("add", {"a": "7"}, "argument a of add is '7'"), ("add", {"a": 7.5}, "argument a of add is 7.5")],
        *[("add", {"a": True}, "argument a of add is True"), ("add", {"a": None}, "argument a of add is None")],
        *[("add", {"a": 1, "note": 3}, "argument note of add is 3"), ("now", {}, "")],
        ("now", {"zone": 1}, "unexpected keyword argument 'zone'"),
        ("choose", {"what": "red", "sizes": [1, 2], "yes": False, "more": {"x": []}}, ""),
        ("choose", {"what": "green", "sizes": [], "yes": False, "more": {}}, "argument what of choose is 'green'"),
        ("choose", {"what": "red", "sizes": ["1"], "yes": False, "more": {}}, "argument sizes of choose"),
        ("choose", {"what": "red", "sizes": [], "yes": 0, "more": {}}, "argument yes of choose is 0"),
        ("choose", {"what": "red", "sizes": [], "yes": True, "more": []}, "argument more of choose"),
    ],
)
def test_arguments_fit_or_the_model_is_told_why_not(tools, name, arguments, misfit):
    told = tools[name].find_misfit(arguments)
    assert (told == "") == (misfit == "") and misfit in told


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *[(name, f"{name} does .*: give each argument a type hint") for name in ("unhinted", "undocumented", "half")],
        *[("many", r"many cannot take as \*numbers: int"), ("named", r"named cannot take as \*\*numbers: int")],
        *[("placed", "placed cannot take as a: int"), ("Kind", "it is no function: name a function")],
        ("doer", "it is no function: name a function"),
    ],
)
def test_what_no_call_can_reach_or_no_model_be_told_is_refused(tmp_path, name, reason):
    with pytest.raises(ConfigError, match=rf"tools='.*:{name}': .*{reason}"):
        Talks(tmp_path, CODE, tools=[name])


def test_two_tools_of_a_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tools='.*:now': there is a tool 'now' already"):
        Talks(tmp_path, CODE, tools=["now", "add", "now"])
    code = CODE + 'class E:\n    def reset(self): pass\n    def now(self):\n        """Tell."""\n'
    with pytest.raises(ConfigError, match=r"environment='.*:E': a tool is named 'now' too"):
        Talks(tmp_path, code, tools=["now"], environment="E")
