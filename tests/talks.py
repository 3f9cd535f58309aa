"""Chat templates like those of known models, written small, and conversations of what answers a policy."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from demo.model import build_tokenizer
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example
from grpo.tools.dialogue import UserResponder, start_turns

_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
_TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content or not loop.first }}<tool_call>"
    """{{ '\n{"name": "' + c.function.name + '", "arguments": ' }}"""
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
)
_QWEN = (
    _TOOLS + "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}" + _TURN + _CALLS + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if think %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
# As Qwen3's, it writes an empty thought into the last turn of the assistant, and takes it out of earlier ones.
_QWEN3 = _QWEN.replace(
    _TURN,
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content }}",
)
_LLAMA = (
    "{{ '<|begin|>' }}{% for m in messages %}"
    "{% if loop.first and tools %}"
    """{{ 'Functions, as {"name": name, "parameters": ...}: ' + (tools | tojson) }}{% endif %}"""
    "{{ '<|head|>' + ('ipython' if m.role == 'tool' else m.role) + '<|/head|>\n\n' }}"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}"
    """{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}"""
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}' }}{% else %}{{ m.content | trim }}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
# As Mistral's, it puts the tools before the last thing that the user says, and asks for ids of nine characters.
_MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and not messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "{{ c.function | tojson }}{% endfor %}{{ ']<|im_end|>' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {\"content\": ' + m.content + '}[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
_GEMMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}"
    "{{ '<start>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start>model\n' }}{% endif %}"
)
_IN_PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% for part in m.content %}{{ part['text'] }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "qwen2": _QWEN,
    "qwen3": _QWEN3,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "gemma": _GEMMA,
    "in parts": _IN_PARTS,
}
_SPECIAL = ["<|head|>", "<|/head|>", "<|begin|>", "<start>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]


@functools.cache
def _bare_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = build_tokenizer(seed=0)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in [*_SPECIAL, "[TOOL_CALLS]"]])
    return tokenizer


def talker(template: str | None = "qwen2") -> PreTrainedTokenizerBase:
    """Return the demo's tokenizer with one of the templates; "demo" is its own, None is without one."""
    tokenizer = copy.deepcopy(_bare_tokenizer())
    if template != "demo":
        tokenizer.chat_template = template and TEMPLATES.get(template, template)
    return tokenizer


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str, ends: bool = True) -> list[int]:
    """Return the ids of what a policy wrote, with the end of a turn."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id] if ends else ids


def call(name: str, **arguments) -> str:
    """Return a call in Qwen's format, as its template writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def answers_in(text: str) -> list[str]:
    """Return what stands in an answer's blocks, as the Qwen-like template writes them."""
    return [block.partition("\n</tool_response>")[0] for block in text.split("<tool_response>\n")[1:]]


class Talk:
    """A completion, whose policy says what a test wants."""

    def __init__(
        self, turns: UserResponder, tokenizer: PreTrainedTokenizerBase, example: Example, length: int, name=None
    ):
        self.dialogue = turns.begin(example, name)
        self._tokenizer, self.room = tokenizer, length
        self.answers: list[str | None] = []

    def say(self, text: str, ends: bool = True) -> str | None:
        """Return the text of the answer; None where the completion is over."""
        drawn = ids_of(self._tokenizer, text, ends)
        self.room -= len(drawn)
        future = self.dialogue.answer(drawn, self.room)
        answer = None if future is None else future.result(60)
        self.room -= len(answer or [])
        self.answers.append(None if answer is None else self._tokenizer.decode(answer))
        return self.answers[-1]


class Talks:
    """Tools or an environment of a file, with a tokenizer."""

    def __init__(self, folder: Path, code: str, template: str | None = "qwen2", ends: Sequence[int] = (), **settings):
        """`settings` are of the trainer; `tools` and `environment` are names within the code. `ends` are ids that end a
        turn beside the tokenizer's."""
        self.file = folder / f"user_code_{len([*folder.iterdir()])}.py"
        self.file.write_text(code)
        for name in ("tools", "environment"):
            if name in settings:
                names = settings[name]
                settings[name] = (
                    f"{self.file}:{names}" if isinstance(names, str) else [f"{self.file}:{n}" for n in names]
                )
        self.tokenizer = talker(template)
        self.ends = [self.tokenizer.eos_token_id, *ends]
        self.turns = start_turns(TrainerConfig(**settings), self.tokenizer, self.ends)
        self._begun: list[Talk] = []

    def begin(self, length: int = 10_000, messages: list | None = None, name=None, **columns) -> Talk:
        """Begin a completion of at most `length` tokens, with this name, for a row of these columns."""
        prompt = ids_of(self.tokenizer, "a question", ends=False)
        example = Example(index=0, prompt="", prompt_ids=prompt, columns=columns, messages=messages or [])
        self._begun.append(Talk(self.turns, self.tokenizer, example, length, name))
        return self._begun[-1]

    def close_talks(self) -> None:
        for talk in self._begun:
            talk.dialogue.close()

    def close(self) -> None:
        self.close_talks()
        self.turns.close()
