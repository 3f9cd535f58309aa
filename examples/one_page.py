"""GRPO on one page: plain PyTorch on one device, the frozen reference model in another process.

    python -m demo --prepare                                                      once: a tiny model and its data
    python ref_server.py --model_name_or_path runs/demo/seed0/model --port 59876  in another terminal
    python -m examples.one_page                                                   a minute on two CPU cores

Read it from the top. docs/one_page.md has the formulas and, for the places marked (1) to (5), what else to try.
grpo_ref_split.py computes the same numbers, on many cards, and saves, resumes and watches itself on the way.
"""

import torch

import grpo
from grpo.algorithm.advantages import advantages
from grpo.algorithm.loss import grpo_loss
from grpo.algorithm.loss_types import StepSize, Tokens
from grpo.config.trainer import TrainerConfig
from grpo.data.prompts import PromptStream, load_examples
from grpo.data.records import Example, Rollout
from grpo.model.load import load_model, load_tokenizer
from grpo.model.logprobs import token_logprobs
from grpo.model.trial import make_batcher
from grpo.sampling.self_check import make_sampler
from reward import correctness_reward, format_reward

CONFIG = TrainerConfig(
    model_name_or_path="runs/demo/seed0/model",
    dataset_name="runs/demo/seed0/data",
    system_prompt="",
    max_prompt_length=96,
    max_completion_length=40,
    num_generations=8,
    prompts_per_step=16,
    max_steps=60,
    learning_rate=2e-4,
    warmup_steps=10,
    beta=0.04,
    dtype="float32",
    seed=0,
    port=59876,
)
REWARDS = [correctness_reward, format_reward]  # (1) your own function


def reward(examples: list[Example], groups: list[list[Rollout]]) -> torch.Tensor:
    """Return what each completion earns by each function: float64 [functions, groups, num_generations]."""
    of_completions = [example for example, group in zip(examples, groups, strict=True) for _ in group]
    given = {name: [example.columns[name] for example in of_completions] for name in examples[0].columns}
    given |= {"prompts": [example.prompt for example in of_completions]}
    given |= {"completions": [rollout.text for group in groups for rollout in group]}
    by_function = torch.tensor([function(**given) for function in REWARDS], dtype=torch.float64)
    return by_function.view(len(REWARDS), len(groups), -1)


def main(config: TrainerConfig = CONFIG) -> list[dict[str, float]]:
    """Train, print a line for each step, and return the numbers in them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(config)
    train_set = PromptStream(load_examples(config, "train", tokenizer), config.prompts_per_step, config.seed)
    held_out = load_examples(config, "test", tokenizer, limit=256)

    model = load_model(config, device)
    batcher = make_batcher(model, tokenizer.pad_token_id)
    rows, longest = config.sequences_per_generate, config.max_completion_length
    sampler = make_sampler(model, tokenizer, longest, rows=rows, packs=batcher.packs)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, betas=(0.9, 0.99), weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min(1, update / config.warmup_steps) if config.warmup_steps else 1
    )
    reference = grpo.RefClient(f"http://127.0.0.1:{config.port}", config.temperature)  # (5) no reference: beta=0
    rows = []

    for step in range(config.max_steps):
        # Draw a group of completions for each prompt, and reward them. (4) draw more, and choose
        examples, ids = train_set.groups_of([step], rank=0, world_size=1)
        groups = sampler.sample(examples, config.num_generations, config.temperature, config.seed, ids=ids)
        rewards = reward(examples, groups)

        # Compare each completion with its group. (3) another way: advantage_estimator="rloo"
        compared = advantages(rewards, torch.ones(len(REWARDS), dtype=torch.float64), config).flatten().float()

        # Ask the server for the log-probs of the frozen model.
        completions = [[rollout.completion_ids for rollout in group] for group in groups]
        asked = zip(examples, completions, strict=True)
        frozen = [logprobs for row, drawn in asked for logprobs in reference.logprobs(row.prompt_ids, drawn)]

        # Sum the loss's gradient over batches of at most micro_batch_tokens tokens. (2) loss_type="dr_grpo"
        pairs = [(row.prompt_ids, ids) for row, drawn in zip(examples, completions, strict=True) for ids in drawn]
        size, total = StepSize(sequences=len(pairs), tokens=sum(len(ids) for _, ids in pairs)), 0.0
        for batch in batcher.cut(pairs, config.micro_batch_tokens):
            sequences = [pairs[place] for place in batch]
            logprobs, entropy = token_logprobs(model, batcher.make(sequences, device), config.temperature, True)
            lengths = torch.tensor([len(ids) for _, ids in sequences], device=device)
            of_reference = torch.cat([torch.from_numpy(frozen[place]) for place in batch]).to(device)
            tokens = Tokens(
                lengths=lengths,
                advantages=compared[batch].to(device),
                logprobs=logprobs,
                entropy=entropy,
                ref_logprobs=of_reference,
            )
            constants = {"beta": config.beta, "entropy_coef": 0.0}
            longest = config.max_completion_length
            loss, metrics = grpo_loss(tokens, size, config, **constants, max_completion_length=longest)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

        rows.append({"loss": total, "reward": rewards.sum(dim=0).mean().item(), "grad_norm": norm.item()})
        if (step + 1) % 20 == 0 or step + 1 == config.max_steps:
            answers = [[rollout] for rollout in sampler.greedy(held_out)]
            rows[-1]["eval_accuracy"] = (reward(held_out, answers)[0] > 0).double().mean().item()
        shown = ", ".join(f"{name} {value:.3f}" for name, value in rows[-1].items())
        print(f"step {step + 1} of {config.max_steps}: {shown}, kl {metrics['kl'].mean():.4f}", flush=True)
    reference.close()
    return rows


if __name__ == "__main__":
    main()
