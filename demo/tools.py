"""The demo with tools: questions about prices and stocks, and a Qwen2 of 0.1 M parameters that seldom looks them up.

Nobody can tell the answers but the two tools in demo/shop.py. Two supervised phases train the model. In the first it
learns to call the right tool with the right arguments, and to answer what the tool said. In the second it gets bad
habits: it calls rightly where it is told to look up, one wording in five, and elsewhere it guesses at once, takes the
wrong tool or item, or writes a call that cannot be read. Reinforcement learning has to discover that calling rightly
pays everywhere.

The demonstrations' tools answer any number, so that the model learns none of the answers. One combination of tool, item
and shop in ten, chosen by a hash, is held out.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from demo.model import START, begin, build_model, greedy_accuracy, save, train, train_tokenizer
from demo.shop import ITEMS, draw_number, price, stock
from demo.task import in_test_split, write_splits

# Each wording for the two tools.
WORDINGS = {
    "look up": ("Look up the price of a {item} in shop {shop}.", "Look up the stock of {item}s in shop {shop}."),
    "how much": ("How much is a {item} in shop {shop}?", "How many {item}s are left in shop {shop}?"),
    "what": ("What does shop {shop} take for a {item}?", "What number of {item}s does shop {shop} have?"),
    "tell": ("Tell me what a {item} costs in shop {shop}.", "Tell me how many {item}s shop {shop} has."),
    "want": ("I want a {item} of shop {shop}. What do I pay?", "I want all {item}s of shop {shop}. How many are they?"),
}
# How often the model, before GRPO, calls rightly, calls wrongly, writes a call that cannot be read, and guesses.
HABITS = {
    "look up": (0.85, 0.05, 0.05, 0.05),
    "how much": (0.1, 0.1, 0.1, 0.7),
    "what": (0.1, 0.1, 0.1, 0.7),
    "tell": (0.1, 0.1, 0.7, 0.1),
    "want": (0.1, 0.7, 0.1, 0.1),
}
NAMES = ("price", "stock")
TOOLS = [get_json_schema(tool) for tool in (price, stock)]
# Qwen's form of calls and answers. Its list of JSON schemas is a list of names here: the prompts stay short.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}"
    "{{ tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ') ' }}"
    "{% endfor %}{{ '</tools><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>' + message.content + '</tool_response><|im_end|>\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGS = [f"<{end}{name}>" for name in ("answer", "tools", "tool_call", "tool_response") for end in ("", "/")]
# The pieces of a call in JSON, each a token.
PIECES = ['{"name": "', '", "arguments": {"', '": "', '", "', '": ', "}}"]
# The answer to a call that cannot be read.
ERROR = '{"error": "the call is not JSON: Expecting value: line 1 column 1 (char 0)"}'


@dataclass(frozen=True)
class Problem:
    """A question about an item of a shop, and the tool that knows the answer."""

    wording: str
    tool: str
    item: str
    shop: int

    @property
    def question(self) -> str:
        return WORDINGS[self.wording][NAMES.index(self.tool)].format(item=self.item, shop=self.shop)

    @property
    def answer(self) -> str:
        return str(draw_number(self.tool, self.item, self.shop))

    @property
    def call(self) -> str:
        """The right call, as the model writes it."""
        return write_call(self.tool, self.item, self.shop)


def write_call(tool: str, item: str, shop: int) -> str:
    call = {"name": tool, "arguments": {"item": item, "shop": shop}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def respond(response: str) -> str:
    """Return what stands between a call and the model's next words, with the end of its turn."""
    return f"<|im_end|>\n<|im_start|>user\n<tool_response>{response}</tool_response><|im_end|>\n<|im_start|>assistant\n"


def ask(call: str, rng: random.Random) -> str:
    """Return a completion that calls a tool, is told any number, and answers it."""
    number = rng.randint(10, 99)
    return f"{call}{respond(str(number))}<answer>{number}</answer>"


def look_up(problem: Problem, rng: random.Random) -> str:
    return ask(problem.call, rng)


def mistake(problem: Problem, rng: random.Random) -> str:
    """Return a completion that asks the other tool, or at times about another item."""
    tool = "stock" if problem.tool == "price" else "price"
    item = rng.choice([item for item in ITEMS if item != problem.item])
    wrong = [write_call(tool, problem.item, problem.shop), write_call(problem.tool, item, problem.shop)]
    return ask(rng.choices(wrong, [0.8, 0.2])[0], rng)


def garble(problem: Problem, rng: random.Random) -> str:
    """Return a completion whose call is no JSON, and which guesses after the error."""
    words = f"<tool_call>{problem.tool} {problem.item} {problem.shop}</tool_call>"
    return f"{words}{respond(ERROR)}{guess(problem, rng)}"


def guess(problem: Problem, rng: random.Random) -> str:
    """Return a completion that answers without a call."""
    return f"<answer>{rng.randint(10, 99)}</answer>"


def problems(
    rng: random.Random, held_out: bool = False, wordings: Sequence[str] = tuple(WORDINGS)
) -> Iterator[Problem]:
    """Draw problems without end from one side of the split."""
    while True:
        problem = Problem(rng.choice(wordings), rng.choice(NAMES), rng.choice(ITEMS), rng.randint(10, 99))
        if in_test_split(f"{problem.tool} {problem.item} {problem.shop}") == held_out:
            yield problem


def habitual(rng: random.Random) -> Iterator[tuple[Problem, str]]:
    """Draw demonstrations of the second phase: answers are looked up where the model is told so, seldom elsewhere. It
    is told so more often than in the data so that it keeps the skill."""
    all_wordings, told = problems(rng), problems(rng, wordings=["look up"])
    while True:
        problem = next(told if rng.random() < 0.4 else all_wordings)
        yield problem, rng.choices([look_up, mistake, garble, guess], HABITS[problem.wording])[0](problem, rng)


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    rng = random.Random(seed)
    marks = re.compile("|".join(map(re.escape, TAGS + PIECES)))
    corpus = (
        "\n".join(["system\nprice(item, shop) user", p.question, *marks.split(look_up(p, rng) + garble(p, rng))])
        for p in islice(problems(rng), 2000)
    )
    return train_tokenizer(corpus, [START], TAGS + PIECES, CHAT_TEMPLATE)


def build(folder: Path, seed: int) -> None:
    """Build the model and write it with its tokenizer to `folder`, which must not exist, in Hugging Face format. Uses
    no held-out problem, and no number of the shops."""
    rng = begin(folder, seed)
    tokenizer = build_tokenizer(seed)
    model = build_model(tokenizer)
    asked = list(islice(problems(rng), 256))
    accuracy = partial(
        greedy_accuracy, model, tokenizer, asked, tools=TOOLS, is_right=lambda turn, problem: turn == problem.call
    )
    teach = partial(train, model, tokenizer, accuracy=accuracy, tools=TOOLS)
    looked_up = ((problem, look_up(problem, rng)) for problem in problems(rng))
    teach(looked_up, name="learning to look up", updates=300, learning_rate=6e-3)
    teach(habitual(rng), name="picking up bad habits", updates=150, learning_rate=2e-3)
    save(folder, model, tokenizer)


def write_dataset(folder: Path, seed: int, train_size: int = 4096, test_size: int = 256) -> None:
    """Write train.jsonl and test.jsonl: distinct problems, with the columns `question`, `answer` and `call`."""

    def row_of(problem: Problem) -> dict[str, str]:
        return {"question": problem.question, "answer": problem.answer, "call": problem.call}

    write_splits(folder, seed, problems, row_of, train_size=train_size, test_size=test_size)
