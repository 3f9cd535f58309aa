"""A tiny model with random weights that calls tools, and ends its turns, often; and what it can call.

Each call is one token of its vocabulary, and the head's bias makes calls and the end of a turn likely.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import PhiConfig, PhiForCausalLM

from demo.model import build_tokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>"
    "{% else %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = (
    '<tool_call>{"name": "price", "arguments": {"item": "pen"}}</tool_call>',
    '<tool_call>{"name": "price", "arguments": {"item": "cake"}}</tool_call>',
    '<tool_call>{"name": "price", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "price", </tool_call>',
)
"""two that price answers, one that lacks an argument, and one that is malformed"""
TOOLS = '''
PRICES = {"pen": 7, "cake": 12}


def price(item: str) -> int:
    """
    Return the price of an item.

    Args:
        item: what is sold
    """
    return PRICES[item]


def cheap(completions, **kwargs):
    """Reward completions that are told the price of a pen."""
    return [1.0 if "pen" in completion else 0.1 * len(completion) / 100 for completion in completions]


class Shop:
    """An environment of TRL's shape, which gives a reward itself."""

    def reset(self, answer, **columns):
        self.answer, self.sold = answer, 0
        return f" The till has {len(answer)} coins."

    def price(self, item: str) -> int:
        """
        Return the price of an item.

        Args:
            item: what is sold
        """
        self.sold += 1
        return PRICES[item]

    def get_reward(self):
        return float(self.sold)


class Haggle:
    """An environment of the small shape: it asks for more until it has heard four turns."""

    def reset(self, columns):
        self.turns = 0
        return f" It costs {columns['answer']}."

    def step(self, text):
        self.turns += 1
        return f"More than {len(text)}!", len(text) / 100, self.turns == 4
'''


def write(folder: Path, seed: int = 1) -> Path:
    """Write a model that calls tools into `folder`/model and `folder`/tools.py; return `folder`."""
    tokenizer = build_tokenizer(seed=0)
    tokenizer.add_tokens([AddedToken(call, special=False, normalized=False) for call in CALLS])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    ids = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(vocab_size=len(tokenizer), max_position_embeddings=1024)
    model = PhiForCausalLM(PhiConfig(**sizes, **ids, initializer_range=0.1))
    with torch.no_grad():
        model.lm_head.bias.zero_()
        # Of this seed's weights the greedy first token is then a call, and the next one ends the turn.
        model.lm_head.bias[tokenizer.convert_tokens_to_ids(list(CALLS))] = torch.tensor([5.5, 4.0, 4.0, 4.0])
        model.lm_head.bias[tokenizer.eos_token_id] = 6.4
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "tools.py").write_text(TOOLS)
    return folder
