"""Reward functions: texts in, a number for each out. reward_funcs in config.yaml names them."""

import re


def right_number(completions, answer, **kwargs):
    """Return 1 if the last number of a completion is the row's `answer`, else 0."""
    found = [re.findall(r"-?[0-9]+(?:\.[0-9]+)?", text_of(completion).replace(",", "")) for completion in completions]
    return [float(numbers[-1:] == [gold.replace(",", "")]) for numbers, gold in zip(found, answer, strict=True)]


def brevity(completions, **kwargs):
    """Return 1 for fewer than 400 characters, else 0."""
    return [float(len(text_of(completion)) < 400) for completion in completions]


def text_of(completion):
    """Return a completion's text: of prompts that are lists of messages it is a list of messages too."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


right_number.is_verdict = True  # evaluation counts what earns more than 0 as right
