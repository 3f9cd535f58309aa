"""The ids of an answer are those that the chat template's whole conversation has at that place."""

import json
from pathlib import Path

import pytest
from requested import ADD
from talks import TEMPLATES, ids_of, talker
from tokenizers import AddedToken

from grpo.config.errors import ConfigError
from grpo.tools.turn_text import AnswerTemplate

QUESTION = {"role": "user", "content": "What is 12 and 3?"}
USER = [{"role": "user", "content": "Wrong, guess\nagain."}]
TOOL = [{"role": "tool", "name": "add", "content": '{"sum": 15}'}]
WITH_TOOLS = ("qwen2", "qwen3", "llama", "mistral")


def make_template(tokenizer, schemas=(ADD,), as_user=False, **kwargs) -> AnswerTemplate:
    return AnswerTemplate(tokenizer, [tokenizer.eos_token_id], [*schemas], kwargs or None, as_user)


def render(tokenizer, messages, schemas=None, go_on=True, **kwargs) -> str:
    return tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False, add_generation_prompt=go_on, **kwargs)


def called(tokenizer, *names) -> dict:
    calls = [
        {"type": "function", "id": "123456789", "function": {"name": name, "arguments": {"a": 12}}} for name in names
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize("answers", [TOOL, [*TOOL, {"role": "tool", "name": "other", "content": "4"}]], ids=len)
@pytest.mark.parametrize("template", WITH_TOOLS)
def test_answers_of_tools_are_what_the_template_writes(template, answers):
    tokenizer = talker(template)
    turn = called(tokenizer, *([answer["name"] for answer in answers] if template != "llama" else ["add"]))
    given = [answer | {"tool_call_id": "123456789"} for answer in answers]
    whole = render(tokenizer, [QUESTION, turn, *given], [ADD])
    alone = render(tokenizer, [QUESTION, turn], [ADD], go_on=False)
    end = alone.rindex(tokenizer.eos_token) + len(tokenizer.eos_token)
    # Qwen3's writes the last turn in another way than an earlier one: only what follows it is the same.
    expected = whole[end:] if template != "qwen3" else whole[whole.rindex("</tool_call><|im_end|>") + 22 :]
    written = make_template(tokenizer)
    assert written.render(answers) == expected != ""
    # What was drawn, and the answer after it, are the conversation's ids: no token spans the place between them.
    drawn = ids_of(tokenizer, whole[: len(whole) - len(expected)], ends=False)
    assert drawn[-1] == tokenizer.eos_token_id
    assert drawn + written.encode(answers) == ids_of(tokenizer, whole, ends=False)


@pytest.mark.parametrize("template", [*TEMPLATES, "demo"])
def test_what_an_environment_says_is_a_message_of_the_user(template):
    tokenizer = talker(template)
    messages = [QUESTION, {"role": "assistant", "content": "15"}, *USER]
    if template == "in parts":
        messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    whole = render(tokenizer, messages)
    ids = ids_of(tokenizer, whole, ends=False)
    ends = [place for place, token in enumerate(ids) if token == tokenizer.eos_token_id]
    place = ends[0 if template == "mistral" else 1]  # that ends no message of the user
    written = make_template(tokenizer, (), as_user=True)
    assert ids[: place + 1] + written.encode(USER) == ids


def test_the_templates_own_arguments_reach_it():
    tokenizer = talker("qwen2")
    text = make_template(tokenizer).render(TOOL)
    assert make_template(tokenizer, think=True).render(TOOL) == text + "<think>\n"


def test_an_end_that_takes_the_line_end_takes_it_here_too():
    """As Phi's, which has no token for the line end after it."""
    tokenizer = talker("qwen2")
    tokenizer.add_tokens([AddedToken("<|over|>", rstrip=True, special=True)])
    tokenizer.eos_token = "<|over|>"
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|over|>")
    ids = make_template(tokenizer).encode(TOOL)
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert make_template(tokenizer).render(TOOL).startswith("\n<|im_start|>")


def test_whichever_end_the_template_writes_is_found():
    tokenizer = talker("llama")
    tokenizer.add_tokens([AddedToken("<|eom|>", special=True)])
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eom|>")]
    expected = AnswerTemplate(tokenizer, ends, [ADD], None, False).render(TOOL)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ '}' }}", "{{ '}<|eom|>' }}")
    assert "<|eom|>" in render(tokenizer, [QUESTION, called(tokenizer, "add"), *TOOL])
    assert AnswerTemplate(tokenizer, ends, [ADD], None, False).render(TOOL) == "<|im_end|>" + expected


def test_the_name_of_the_next_role_may_end_a_turn():
    """As GLM's: the policy draws it, so it is no part of the answer."""
    tokenizer = talker("gemma")
    roles = ["<|user|>", "<|assistant|>", "<|observation|>"]
    tokenizer.add_tokens([AddedToken(role, special=True) for role in roles])
    tokenizer.chat_template = (
        "{{ tools | tojson }}{% for m in messages %}"
        "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    ends = [tokenizer.convert_tokens_to_ids(role) for role in (roles[0], roles[2])]
    written = AnswerTemplate(tokenizer, ends, [ADD], None, True)
    assert written.render(TOOL) == '{"sum": 15}<|assistant|>'
    assert written.render(USER) == "Wrong, guess\nagain.<|assistant|>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("demo", "leaves out the tools"),
        ("gemma", "leaves out the tools"),
        (TEMPLATES["qwen2"] + "{% if %}", "refuses them (Expected an expression"),
        ("{% if tools %}{{ raise_exception('none\n here') }}{% endif %}", "refuses them (none here)"),
        (TEMPLATES["qwen2"].replace("'<|im_end|>\n'", "'\n'"), "ends a turn with none of <|im_end|>, as the model"),
        (TEMPLATES["qwen2"].replace("m.content + '\n</tool", "'\n</tool"), "leaves out the answers"),
        (TEMPLATES["qwen2"].replace("m.tool_calls or []", "[]"), "leaves out the turns that answers follow"),
        (TEMPLATES["qwen2"].replace("{{ '\n<tool_response>", "{{ raise_exception('no tools') }}{{ '"), "refuses them"),
    ],
)
def test_a_template_that_cannot_say_answers_is_refused(template, reason):
    with pytest.raises(ConfigError, match="model_name_or_path=.*its chat template.*use a model that") as refused:
        make_template(talker(template))
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_a_template_without_a_second_question_is_refused_for_an_environment():
    only_one = TEMPLATES["gemma"] + "{% if messages | length > 2 %}{{ raise_exception('one question') }}{% endif %}"
    with pytest.raises(ConfigError, match="cannot write tools and answers of user: it refuses them .one question"):
        make_template(talker(only_one), (), as_user=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_training", "llama3_1", "qwen3_8_training"])
def test_ids_are_those_of_trl(name):
    """TRL takes the ids that are more in a conversation with answers than without."""
    trainer = pytest.importorskip("trl").GRPOTrainer
    import trl

    tokenizer = talker((Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text())
    tokenizer.add_tokens([AddedToken(t, special=True) for t in ("<|eot_id|>", "<|eom_id|>")])
    end = {"llama3_1": "<|eot_id|>"}.get(name, "<|im_end|>")
    tokenizer.eos_token = end

    class Needed:
        processing_class = _tokenizer = tokenizer
        chat_template, chat_template_kwargs, _is_vlm = tokenizer.chat_template, {}, False

    for answers in (TOOL, TOOL * 3):
        expected = trainer._get_tool_suffix_ids(Needed, answers)
        assert make_template(tokenizer).encode(answers) == expected and len(expected) > 5, json.dumps(answers)
