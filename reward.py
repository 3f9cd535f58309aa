"""Reward functions: the file to edit.

A reward function turns texts into numbers. Its signature is TRL's. Add yours here and name it in `reward_funcs`:

    def brevity_reward(completions, **kwargs) -> list[float | None]:
        return [1.0 if len(completion) < 400 else 0.0 for completion in completions]

It returns a number for each completion, in a list, an array or a tensor; None adds nothing. Take what you need by name,
and `**kwargs` for the rest. These are lists with a value for each completion:

    prompts          the prompt as the model reads it: text with the chat template applied
    completions      text
    completion_ids   the completion's token ids
    answer           the gold answer, from `dataset_answer_column`: the text after the last ####, if it has one
    NAME             each column of the dataset by its name; a picture is a PIL image

If the dataset's prompts are lists of messages, `prompts` has these lists, `completions` has lists of one message,
[{"role": "assistant", "content": text}], and `prompt_texts` has the prompts' texts. A dataset's column `answer` that is
not `dataset_answer_column` stays `answer`. Three more arguments are no lists:

    trainer_state    an object with global_step, the number of updates done, and max_steps
    log_extra        log_extra(column, values) adds a column, a value for each completion, to completions.jsonl
    log_metric       log_metric(name, value) adds a metric to metrics.jsonl: the mean over all ranks

Evaluation reports the mean of each function and their weighted sum; of a function that declares itself a verdict also
accuracy, avg@k and pass@k, where a reward above 0 is a right answer:

    brevity_reward.is_verdict = True
"""

import re

from grpo.rewards.answers import ASCII, NUMBER_IN_TEXT, find_last_boxed, same_value, to_number

TAGS = "think", "answer"
ENDING = re.compile(r"(?:\s|<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>|<\|end\|>|<end_of_turn>|<eos>|</s>)*")
IN_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9]{3}(?![0-9]))")  # LaTeX's ways to separate thousands
TAG_OR_TOKEN = re.compile(r"</?\w+>|<[|｜]|\[/?INST\]")


def correctness_reward(prompts, completions, answer, **kwargs) -> list[float | None]:
    r"""Return 2.0 if the last `<answer>...</answer>` holds the gold `answer`, 1.5 for the same value, else 0.0.

    Without an `<answer>`, the last `\boxed{...}` is the answer. The last `\boxed{...}` of a gold is the gold. The same
    value (grpo/rewards/answers.py) is the same word, choice or number or, if the `math-verify` package is installed and
    text or gold is more than a number, an equal expression. Two units must not differ.
    """
    check_golds(answer)
    pairs = zip(completions, answer, strict=True)
    # In a mixture a dataset may have no answers.
    return [None if gold is None else score_answer(text_of(completion), gold) for completion, gold in pairs]


correctness_reward.is_verdict = True  # evaluation: an answer that earns anything is right


def format_reward(prompts, completions, prompt_texts=None, tags=TAGS, **kwargs) -> list[float | None]:
    """Return 0.2 for each of the four tags that occurs exactly once, after the tags already counted: 0.0 to 0.8.

    Only white space and end tokens may follow `</answer>`. Tags at the prompt's end count (see `find_opened_tags`).
    Other tags are named in `reward_funcs` itself: "format_reward(reasoning, answer)", not by a column of the dataset.

        <think>2+2</think> <answer>4</answer><|im_end|>   0.8
        <think>2+2</think> <answer>4</answer> Done!       0.6   text after the last tag
        <think>2+2 <answer>4</answer>                     0.6   a tag is missing
        <think><think>2+2</think> <answer>4</answer>      0.6   a tag is repeated
        <answer>4</answer> <think>2+2</think>             0.4   wrong order
    """
    pairs = zip(prompt_texts or prompts, completions, strict=True)
    tags = tags if isinstance(tags, tuple) else TAGS
    return [score_format(text_of(completion), text_of(prompt), tags) for prompt, completion in pairs]


format_reward.full_reward = 0.8  # evaluation: the share of answers that earn it is eval_format


def boxed_format_reward(prompts, completions, prompt_texts=None, **kwargs) -> list[float]:
    r"""Return 1.0 for `<think>...</think>` and a `\boxed{...}` after it, else 0.0, as EasyR1's math.py judges it. Tags
    at the prompt's end count (see `find_opened_tags`)."""
    pairs = zip(prompt_texts or prompts, completions, strict=True)
    texts = [(text_of(completion), text_of(prompt)) for prompt, completion in pairs]
    return [float(has_boxed_format(find_opened_tags(text, prompt) + text)) for text, prompt in texts]


boxed_format_reward.full_reward = 1.0


def last_number_reward(completions, answer, **kwargs) -> list[float | None]:
    """Return 1.0 if the last number of the text has the gold's value, else 0.0: for answers without tags. The last
    number of "2 1/2" is 2.5, of "20-18" 18."""
    check_golds(answer)
    texts = [IN_THOUSANDS.sub(",", text_of(completion).translate(ASCII)) for completion in completions]
    found = [NUMBER_IN_TEXT.findall(text)[-1:] for text in texts]
    values = [to_number(last[0]) if last else None for last in found]
    return [
        None if gold is None else float(value is not None and value == to_number(find_last_boxed(gold) or gold))
        for value, gold in zip(values, answer, strict=True)
    ]


last_number_reward.is_verdict = True


# From here on: how an answer is found and its form judged; grpo/rewards/answers.py compares it with the gold. Your own
# functions need nothing of it.


def text_of(text_or_messages: str | list[dict[str, str]]) -> str:
    """Return a text unchanged, and the last content of a list of messages; of a message of calls alone ""."""
    return text_or_messages if isinstance(text_or_messages, str) else text_or_messages[-1]["content"] or ""


def check_golds(answer: list) -> None:
    for gold in answer:
        if not isinstance(gold, str | None):
            raise TypeError(f"the gold answer {gold!r} is no text: change the dataset, or write your own reward")


def score_answer(completion: str, gold: str) -> float:
    """Return 2.0, 1.5 or 0.0 as `correctness_reward`. An empty answer is never correct."""
    text, gold = find_last_answer(completion), gold.strip()
    boxed = find_last_boxed(gold)
    if text and text in (gold, boxed):
        return 2.0
    return 1.5 if text and same_value(text, boxed or gold) else 0.0


def score_format(completion: str, prompt: str, tags: tuple[str, str] = TAGS) -> float:
    first, second = tags
    completion = find_opened_tags(completion, prompt, first) + completion
    marks, last_mark = (f"<{first}>", f"</{first}>", f"<{second}>"), f"</{second}>"
    ends_well = ENDING.fullmatch(completion.rpartition(last_mark)[2])
    counted, last = 0, -1
    for tag in [*marks, last_mark] if ends_well else marks:
        if completion.count(tag) == 1 and completion.index(tag) > last:
            counted, last = counted + 1, completion.index(tag)
    return round(0.2 * counted, 1)


def has_boxed_format(text: str) -> bool:
    thought, _, rest = text.lstrip().partition("</think>")
    return thought.startswith("<think>") and "}" in rest.partition("\\boxed{")[2]


def find_opened_tags(completion: str, prompt: str, name: str = "think") -> str:
    """Return the tags of this name at the prompt's end, or "".

    A prompt may end in `<think>` (templates of R1, QwQ and Qwen3-Thinking), in an empty `<think> </think>` (Qwen3 with
    enable_thinking=false) or, prefilled, in `<think>`, a line break and the start of a thought. The last two count only
    if the tag begins a line or follows a template's token, no other tag or token follows, and, for an empty pair, the
    completion has no `<think>`.
    """
    begin, end = f"<{name}>", f"</{name}>"
    before, tag, after = prompt.rpartition(begin)
    if tag and not after.strip():
        return begin
    if not tag or (before and before[-1] not in "\n>]"):
        return ""
    if after.strip().startswith(end):
        is_empty_pair = after.strip() == end and begin not in completion
        return begin + end if is_empty_pair else ""
    return begin if after.startswith("\n") and not TAG_OR_TOKEN.search(after) else ""


def find_last_answer(completion: str) -> str:
    r"""Return the stripped text of the last closed `<answer>`; without `<answer>`, of the last `\boxed{...}`."""
    if "<answer>" not in completion:
        return find_last_boxed(completion)
    closed = [part for part in completion.split("<answer>")[1:] if "</answer>" in part]
    return closed[-1].partition("</answer>")[0].strip() if closed else ""
