"""Build the demo's language model: a Qwen2 of 0.1 M parameters that can work in steps but seldom does.

Two supervised phases train it. In the first it learns to work out every problem, step by step. In the second it gets
bad habits: it works out most problems of one story in five, and in the others it blurts an answer, nearly always a
wrong one, or forgets the tags. Greedy accuracy falls to about a quarter. Reinforcement learning has to discover that
thinking pays everywhere.
"""

import random
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import PushToHubMixin

from demo.task import Problem, blurt, problems, steps, untagged
from grpo.run.folder import whole_folder

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
TAG = re.compile("|".join(TAGS))
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# How Qwen2 splits text into words. AutoTokenizer splits so for every Qwen2 model, whatever its tokenizer.json says.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCABULARY = 512
# What answers the model between two of its turns.
ANSWER = re.compile(r"(?<=<\|im_end\|>)(\n<\|im_start\|>.*?<\|im_start\|>assistant\n)", re.DOTALL)
MAX_NEW_TOKENS = 40
BATCH = 32
WARMUP_UPDATES = 20
SHOWN_EVERY = 3.0  # seconds
# What a model is fed beside the ids of some problems, which are padded: int64 [problems, longest].
InputsOf = Callable[[list, torch.Tensor], dict[str, torch.Tensor]]


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    corpus = (
        "\n".join(["user", p.question, "assistant", *TAG.split(steps(p) + blurt(p)), untagged(p)])
        for p in islice(problems(random.Random(seed)), 2000)
    )
    return train_tokenizer(corpus, [START], TAGS, CHAT_TEMPLATE)


def train_tokenizer(
    corpus: Iterator[str], special_tokens: list[str], tags: list[str], chat_template: str
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `VOCABULARY` tokens, which can encode any text; every digit is a token.
    `special_tokens` are those beside padding and end; `tags` are ordinary tokens that no corpus needs to have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated")
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(tags),
        special_tokens=[PAD, *special_tokens, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokens = {"eos_token": END, "pad_token": PAD, "additional_special_tokens": special_tokens}
    options = {"chat_template": chat_template, "clean_up_tokenization_spaces": False, "model_max_length": 512}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens, **options)


def language_settings(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the settings of a tiny Qwen2. At the usual initializer_range, 0.02, one so small learns far slower."""
    sizes = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, max_position_embeddings=512)
    layers = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, initializer_range=0.06)
    ids = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return sizes | layers | ids


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    model = Qwen2ForCausalLM(Qwen2Config(**language_settings(tokenizer), tie_word_embeddings=True, dtype="float32"))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def prompt_text(tokenizer: PreTrainedTokenizerFast, question: str, tools: list[dict] | None = None) -> str:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)


def answer_of(completion: str) -> str | None:
    """Return the text between the last pair of answer tags, or None."""
    answers = re.findall(r"<answer>(.*?)</answer>", completion)
    return answers[-1].strip() if answers else None


def has_answer(completion: str, problem: Problem) -> bool:
    return answer_of(completion) == problem.answer


@torch.no_grad()
def greedy_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Problem],
    inputs_of: InputsOf | None = None,
    tools: list[dict] | None = None,
    is_right: Callable[[str, Problem], bool] = has_answer,
) -> float:
    """Return the share of the problems whose greedy completion is right."""
    texts = [prompt_text(tokenizer, problem.question, tools) for problem in examples]
    inputs = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    more = inputs_of(examples, inputs["input_ids"]) if inputs_of else {}
    ids = model.generate(**inputs, **more, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    completions = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(map(is_right, completions, examples)) / len(examples)


def demonstration_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: list[tuple[Problem, str]],
    inputs_of: InputsOf | None = None,
    tools: list[dict] | None = None,
) -> torch.Tensor:
    """Return the mean cross-entropy of the completions' tokens, the end token among them, without those of answers. An
    answer of a tool or a game is what stands in a completion from one <|im_end|> to the next words of the model."""
    rows = []
    for problem, text in demonstrations:
        parts = [prompt_text(tokenizer, problem.question, tools), *ANSWER.split(text + END)]
        # Words of the model and answers take turns; each is tokenised alone, as they are when GRPO draws them.
        rows.append([(token, place % 2 == 1) for place, part in enumerate(parts) for token in tokenizer.encode(part)])
    ids = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor([token for token, _ in tokens])
        labels[row, : len(tokens)] = torch.tensor([token if learned else -100 for token, learned in tokens])
    inputs = inputs_of([problem for problem, _ in demonstrations], ids) if inputs_of else {}
    return model(input_ids=ids, labels=labels, use_cache=False, **inputs).loss


def habitual(rng: random.Random) -> Iterator[tuple[Problem, str]]:
    """Draw demonstrations of the second phase: answers are mostly worked out in the bus story, seldom in any other.
    What the model does with a story depends on the proportions within that story, not on how often it is drawn. The bus
    story is drawn more often than its share so that the model keeps the skill."""
    all_stories, buses = problems(rng), problems(rng, stories=["bus"])
    while True:
        problem = next(buses if rng.random() < 0.4 else all_stories)
        odds = [0.8, 0.1, 0.1] if problem.story == "bus" else [0.1, 0.6, 0.3]
        yield problem, rng.choices([steps, blurt, untagged], odds)[0](problem)


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: Iterator[tuple[Problem, str]],
    accuracy: Callable[[], float] | None = None,
    *,
    name: str,
    updates: int,
    learning_rate: float,
    **inputs: Any,
) -> None:
    """Train on demonstrations; the rate falls from `learning_rate` to nearly 0. Prints how far it is every few seconds,
    and the accuracy at the end, if any. `inputs` are those of demonstration_loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min((update + 1) / WARMUP_UPDATES, 1 - 0.97 * update / updates)
    )
    shown = time.monotonic()
    for update in range(1, updates + 1):
        loss = demonstration_loss(model, tokenizer, list(islice(demonstrations, BATCH)), **inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if update == updates or time.monotonic() - shown > SHOWN_EVERY:
            print(f"{name}: {update} of {updates} updates, loss {loss.item():.3f}", flush=True)
            shown = time.monotonic()
    if accuracy is not None:
        print(f"{name}: accuracy {accuracy():.0%}", flush=True)


def build(folder: Path, seed: int) -> None:
    """Build the model and write it with its tokenizer to `folder`, which must not exist, in Hugging Face format. Uses
    no held-out problem. Takes about 30 s of one CPU core."""
    rng = begin(folder, seed)
    tokenizer = build_tokenizer(seed)
    model = build_model(tokenizer)
    accuracy = partial(greedy_accuracy, model, tokenizer, list(islice(problems(rng), 256)))
    teach = partial(train, model, tokenizer, accuracy=accuracy)
    worked_out = ((problem, steps(problem)) for problem in problems(rng))
    teach(worked_out, name="learning to reason", updates=500, learning_rate=6e-3)
    teach(habitual(rng), name="picking up bad habits", updates=200, learning_rate=2e-3)
    save(folder, model, tokenizer)


def begin(folder: Path, seed: int) -> random.Random:
    """Seed torch, and return random numbers of this seed. Raises FileExistsError if a model is there already."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists; remove it to build the model again")
    if torch.get_num_threads() > 1:  # in a notebook: two would wait for each other where other programs run
        torch.set_num_threads(1)
    torch.manual_seed(seed)
    return random.Random(seed)


def save(folder: Path, *parts: PushToHubMixin) -> None:
    """Write model, tokenizer and what else belongs to them to `folder`. Raises SaveError; then it does not exist."""
    with whole_folder(folder, "model") as unfinished:
        for part in parts:
            part.save_pretrained(unfinished)
