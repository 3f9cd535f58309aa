"""Ask a model general questions before and after its training on one task: does it still speak English?"""

from pathlib import Path

import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

MAX_NEW_TOKENS = 32
QUESTIONS = [
    "What is the capital of France?",
    "Which planet is closest to the sun?",
    "Who wrote the play Romeo and Juliet?",
    "What is the largest ocean on Earth?",
    "How many days are there in a week?",
    "What is the opposite of hot?",
    "Which animal says meow?",
    "What do plants need to grow?",
    "What color is the sky on a clear day?",
    "In which country is the city of Tokyo?",
    "Complete the sentence: The early bird catches",
    "Complete the sentence: Once upon a time, there was",
    "Complete the sentence: She opened the door and saw",
    "Complete the sentence: In winter, people like to",
    "Complete the sentence: The best thing about summer is",
    "Write one sentence about a dog.",
    "Name three fruits.",
    "Give me a short greeting for a friend.",
    "Explain in one sentence what rain is.",
    "What is a good name for a cat?",
]


def compare(before: Path, after: Path) -> tuple[list[tuple[str, str]], float]:
    """Return both models' greedy answers to QUESTIONS, and KL(before || after) of the next token, nats: the exact
    divergence of all words, the mean over the tokens of the first model's answers."""
    disable_progress_bar()  # of loading, which takes a second
    tokenizer = AutoTokenizer.from_pretrained(before, padding_side="left")
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    form = {"padding": True, "return_dict": True, "return_tensors": "pt"}
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, **form)
    prompt_length = prompts.input_ids.shape[1]
    drawn, log_probs = [], []
    for folder in (before, after):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            ids = model.generate(**prompts, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            drawn.append(ids[:, prompt_length:])
            log_probs.append(next_token_log_probs(model, prompts, drawn[0], tokenizer.eos_token_id))
    answers = [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in drawn]
    divergence = kl_div(log_probs[1], log_probs[0], log_target=True, reduction="batchmean")
    return list(zip(*answers, strict=True)), divergence.item()


def next_token_log_probs(model, prompts, answers: torch.Tensor, eos_token_id: int) -> torch.Tensor:
    """Return log-probs [tokens, words] of each next token in answers, int64 [answers, longest], to the first end."""
    counted = (answers == eos_token_id).cumsum(1) - (answers == eos_token_id).long() == 0
    mask = torch.cat([prompts.attention_mask, counted.long()], dim=1)
    ids = torch.cat([prompts.input_ids, answers], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, -answers.shape[1] - 1 : -1]
    return logits[counted].float().log_softmax(-1)
