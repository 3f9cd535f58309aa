"""What the chat template does to histories: no drawn id is replaced, and ends of turns are neither lost nor doubled."""

import importlib.util
import json
from pathlib import Path

import pytest
from requested import ADD, Asked, begun, sent_back, spelled, tool, user
from talks import TEMPLATES, call, ids_of, talker
from tokenizers import AddedToken

from grpo.agents.requests import Refused

# As Qwen3's: the thinking of earlier turns is left out, and without thinking a prompt ends with an empty thought.
THINKS = (
    TEMPLATES["qwen2"]
    .replace("+ m.content }}", "+ (m.content if loop.last else m.content.split('</think>')[-1].lstrip('\n')) }}")
    .replace("{% if think %}{{ '<think>\n' }}", "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}")
)
STRIPS = TEMPLATES["qwen2"].replace("m.content }}{% for c", "m.content | trim }}{% for c")
DATED = "{{ '<|im_start|>system\nToday is ' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}" + TEMPLATES["qwen2"]
TEXT_ARGUMENTS = TEMPLATES["qwen2"].replace("c.function.arguments | tojson", "'' + c.function.arguments")
ODD_CALL = '\n<tool_call>{"name" :"add",  "arguments":{ "b":1.0,"a": 2}}</tool_call> '


def rendered(tokenizer, messages, go_on=True, **kwargs) -> str:
    if "part in m.content" in tokenizer.chat_template:
        messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=go_on, **kwargs)


def after_turn(tokenizer, tail, **kwargs) -> str:
    """Return what the template writes after the text of a turn."""
    return rendered(tokenizer, [user("?"), {"role": "assistant", "content": "THAT"}, *tail], **kwargs).split("THAT")[1]


@pytest.mark.parametrize("template", [*TEMPLATES, "demo", THINKS, STRIPS, DATED])
def test_a_conversation_goes_on_from_the_ids_drawn(template):
    tokenizer = talker(template)
    asked = Asked(tokenizer)
    messages, before = [user("What is 12 and 3?")], None
    for text in (" 15 \n", "<think>\nso 15\n</think>\n\n15", "", "It is  15."):
        drawn = spelled(tokenizer, text)
        node = asked.ask(messages, drawn)
        if before is not None:
            between = node.prompt_ids[len(before) :]
            assert node.prompt_ids[: len(before)] == before
            assert tokenizer.decode([before[-1], *between]) == after_turn(tokenizer, messages[-1:])
        before = [*node.prompt_ids, *drawn]
        messages += [sent_back(node, content=node.reply["content"].strip()), user(f"Is it not {len(text)}?")]
    [branch] = asked.episode.branches()
    assert branch.prompt_ids + branch.completion_ids == before
    # Each turn of the policy ends once.
    count = sum(len(ids) for _, ids in asked.given)
    assert sum(branch.drawn) == count
    assert begun(asked.episode) == {"new_conversation": 1}


def test_a_template_that_writes_the_date_writes_one_for_the_whole_run():
    tokenizer = talker(DATED)
    asked = Asked(tokenizer)
    first = asked.ask([user("a")], "b")
    assert "Today is 26 Jul 2024<|im_end|>" in tokenizer.decode(first.prompt_ids)
    other = asked.ask([user("a")], "b")
    assert other.prompt_ids == first.prompt_ids
    then = asked.ask([user("a"), sent_back(first), user("c")], "d")
    assert tokenizer.decode(then.prompt_ids).count("Today") == 1


@pytest.mark.parametrize("template", ["qwen2", "qwen3", THINKS, STRIPS, TEXT_ARGUMENTS])
def test_calls_may_have_other_spaces_than_the_template_writes(template):
    tokenizer = talker(template)
    asked = Asked(tokenizer)
    drawn = spelled(tokenizer, ODD_CALL)
    first = asked.ask([user("2 and 1?")], drawn, [ADD])
    [made] = first.reply["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": 2, "b": 1}
    # A program in JavaScript that has parsed the arguments and written them again.
    again = made | {"function": {"name": "add", "arguments": '{"a":2,"b":1}'}}
    history = [user("2 and 1?"), sent_back(first, tool_calls=[again]), tool(made["id"], "3")]
    second = asked.ask(history, "It is 3.", [ADD])
    assert second.prompt_ids[: len(first.prompt_ids) + len(drawn)] == [*first.prompt_ids, *drawn]
    between = tokenizer.decode(second.prompt_ids[len(first.prompt_ids) + len(drawn) :])
    assert between == ("\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert len(asked.episode.branches()) == 1


@pytest.mark.parametrize("parser", ["llama", "mistral"])
def test_answers_to_calls_of_other_formats_follow_the_ids_drawn(parser):
    tokenizer = talker(parser)
    asked = Asked(tokenizer)
    text = '[TOOL_CALLS]  [{"name":"add","arguments":{"a":1}}]'
    answer = '[TOOL_RESULTS] {"content": [1]}[/TOOL_RESULTS]'
    if parser == "llama":
        text = '{"name" :"add", "parameters":{"a":1}}'
        answer = "<|head|>ipython<|/head|>\n\n[1]<|im_end|><|head|>assistant<|/head|>\n\n"
    drawn = spelled(tokenizer, text) if parser == "llama" else ids_of(tokenizer, text)
    first = asked.ask([user("1?")], drawn, [ADD])
    [made] = first.reply["tool_calls"]
    second = asked.ask([user("1?"), sent_back(first), tool(made["id"], "[1]")], "1", [ADD])
    assert second.parent is first
    assert second.prompt_ids[: len(first.prompt_ids) + len(drawn)] == [*first.prompt_ids, *drawn]
    assert tokenizer.decode(second.prompt_ids[len(first.prompt_ids) + len(drawn) :]) == answer
    # Where it is rendered, as the question was changed, the ids of calls are such as the template takes.
    edited = asked.ask([user("2?"), sent_back(first), tool(made["id"], "[1]")], "1", [ADD])
    assert edited.parent is None and '"a": 1' in tokenizer.decode(edited.prompt_ids)


def test_a_template_that_asks_for_text_gets_arguments_as_text():
    tokenizer = talker(TEXT_ARGUMENTS)
    asked = Asked(tokenizer)
    first = asked.ask([user("1?")], call("add", a=1), [ADD])
    history = [sent_back(first), tool(first.reply["tool_calls"][0]["id"], "1")]
    edited = asked.ask([user("2?"), *history], "1", [ADD])
    assert '"arguments": {"a": 1}}\n</tool_call><|im_end|>' in tokenizer.decode(edited.prompt_ids)
    assert begun(asked.episode) == {"new_conversation": 1, "changed_history": 1}


@pytest.mark.parametrize("template", [*TEMPLATES, "demo"])
def test_a_turn_that_was_cut_gets_its_end_undrawn(template):
    tokenizer = talker(template)
    asked = Asked(tokenizer)
    drawn = spelled(tokenizer, "It is  15. Or", ends=False)
    first = asked.ask([user("12 and 3?")], drawn)
    assert not first.finished and first.reply["content"] == "It is  15. Or"
    second = asked.ask([user("12 and 3?"), sent_back(first), user("Go on.")], "16")
    start = len(first.prompt_ids) + len(drawn)
    assert second.prompt_ids[:start] == [*first.prompt_ids, *drawn]
    assert tokenizer.decode(second.prompt_ids[start:]) == after_turn(tokenizer, [user("Go on.")])
    [branch] = asked.episode.branches()
    ends = [drawn for drawn, i in zip(branch.drawn, branch.completion_ids, strict=True) if i == tokenizer.eos_token_id]
    assert ends == [False, True] if template == "mistral" else [False, False, True]
    assert not first.is_stopped and asked.episode.record(4).finished


def test_a_stop_text_cuts_the_reply_and_no_id():
    tokenizer = talker()
    asked = Asked(tokenizer)
    drawn = ids_of(tokenizer, "Action: add Obs", ends=False)
    first = asked.ask([user("?")], drawn, stop=["Obs"], stop_at=12)
    assert first.reply["content"] == "Action: add " and first.is_stopped
    second = asked.ask([user("?"), sent_back(first), user("Obs 3")], "3")
    rest = second.prompt_ids[len(first.prompt_ids) :]
    assert rest[: len(drawn)] == drawn
    assert tokenizer.decode(rest[len(drawn) :]).startswith("<|im_end|>\n<|im_start|>user\nObs 3<|im_end|>")


def test_an_empty_thought_that_the_prompt_ends_with_makes_no_branches():
    tokenizer = talker(THINKS)
    asked = Asked(tokenizer, template_kwargs={"enable_thinking": False})
    messages = [user("1?")]
    for text in ("one", "two", "three"):
        node = asked.ask(messages, text)
        assert tokenizer.decode(node.prompt_ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        messages += [sent_back(node), user("And?")]
    [branch] = asked.episode.branches()
    text = tokenizer.decode(branch.prompt_ids + branch.completion_ids)
    assert text.count("<think>\n\n</think>\n\n") == 3 and sum(branch.drawn) == sum(len(ids) for _, ids in asked.given)


@pytest.mark.parametrize("history", ["drawn", "rendered"])
def test_a_history_that_the_template_writes_otherwise(history):
    tokenizer = talker(THINKS)
    asked = Asked(tokenizer, history=history)
    messages = [user("1?")]
    for text in ("<think>\nso\n</think>\n\none", "She had apples", "three"):
        drawn = spelled(tokenizer, text)
        assert text == "three" or drawn != ids_of(tokenizer, text)
        node = asked.ask(messages, drawn)
        messages += [sent_back(node), user("And?")]
    whole = rendered(tokenizer, messages[:3])
    assert "so" not in whole
    turns = [branch.completion_ids.count(tokenizer.eos_token_id) for branch in asked.episode.branches()]
    if history == "drawn":
        assert turns == [5] and begun(asked.episode) == {"new_conversation": 1}
        assert "so" in tokenizer.decode(node.prompt_ids)
    else:
        # The thinking is left out in the second request. The third goes on from the second, however it is spelled.
        assert turns == [1, 3] and begun(asked.episode) == {"new_conversation": 1, "rendered_otherwise": 1}
        assert asked.episode.branches()[1].prompt_ids == ids_of(tokenizer, whole, ends=False)
        assert tokenizer.decode(node.prompt_ids) == rendered(tokenizer, messages[:5])


def test_without_a_template_messages_are_plain_text():
    tokenizer = talker(None)
    asked = Asked(tokenizer)
    first = asked.ask([{"role": "system", "content": "Add."}, user("1 and 2")], "3")
    assert tokenizer.decode(first.prompt_ids) == "Add.\n\n1 and 2\n\n"
    second = asked.ask([{"role": "system", "content": "Add."}, user("1 and 2"), sent_back(first), user("and 3")], "6")
    assert second.prompt_ids == [*first.prompt_ids, *first.ids, *ids_of(tokenizer, "\n\nand 3\n\n", ends=False)]
    with pytest.raises(Refused, match="^tools: model_name_or_path=.* no chat template for tools: use") as refused:
        asked.ask([user("1")], "2", [ADD])
    assert (refused.value.status, refused.value.param) == (400, "tools")


@pytest.mark.parametrize(
    ("template", "messages", "tools", "param", "reason"),
    [
        ("demo", [user("1")], [ADD], "tools", "leaves out the tools"),
        ("gemma", [user("1"), user("2")], [], "messages", "user and assistant take turns"),
        ("{{ 1 / 0 }}", [user("1")], [], "messages", "division by zero"),
        ("no question", [user("1")], [], "messages", "leaves out the user's text"),
    ],
)
def test_what_a_template_cannot_write_is_refused(template, messages, tools, param, reason):
    asked = Asked(talker(template))
    with pytest.raises(Refused, match=f"^{param}: ") as refused:
        asked.ask(messages, "3", tools)
    assert reason in refused.value.message and refused.value.param == param and "\n" not in refused.value.message
    assert asked.episode.nodes == [] and asked.episode.branches() == []


def test_answers_that_a_template_cannot_write_are_refused_and_spoil_nothing():
    asked = Asked(talker("gemma"))
    first = asked.ask([user("1")], "2")
    with pytest.raises(Refused, match="^messages: .*take turns"):
        asked.ask([user("1"), sent_back(first), user("3"), user("4")], "5")
    second = asked.ask([user("1"), sent_back(first), user("3")], "5")
    assert second.parent is first


TRL = importlib.util.find_spec("trl")
ENDS = {"llama3_1": "<|eot_id|>", "phi3": "<|end|>", "gemma3": "<end_of_turn>"}


@pytest.mark.skipif(TRL is None, reason="the templates of known models come with trl")
@pytest.mark.parametrize(
    ("name", "thinks", "is_same"),
    [
        *((name, False, True) for name in ("qwen2_5", "qwen3_instruct_2507", "llama3_1", "phi3", "gemma3")),
        ("qwen3", True, False),
    ],
)
def test_templates_of_known_models(name, thinks, is_same):
    """A history is what the template writes of it, or the drawn thinking is kept in it."""
    tokenizer = talker((Path(TRL.origin).parent / f"chat_templates/{name}.jinja").read_text())
    end = ENDS.get(name, "<|im_end|>")
    tokenizer.add_tokens([AddedToken(end, special=True)])
    tokenizer.eos_token, tokenizer.bos_token = end, "<|endoftext|>"
    asked = Asked(tokenizer)
    messages = [user("12 and 3?")]
    for text in ("<think>\nso\n</think>\n\n15" if thinks else "15", "16"):
        node = asked.ask(messages, spelled(tokenizer, text))
        messages += [sent_back(node), user("Sure?")]
    [branch] = asked.episode.branches()
    drawn = [i for i, is_drawn in zip(branch.completion_ids, branch.drawn, strict=True) if is_drawn]
    assert drawn == [i for _, ids in asked.given for i in ids]
    text = tokenizer.decode(branch.prompt_ids + branch.completion_ids)
    assert rendered(tokenizer, messages[:-1], go_on=False).startswith(text) == is_same
    assert ("so" in text) == thinks
