"""Evaluates a saved model on a dataset: what its answers earn, and how many problems it solves (avg@k, pass@k).

    grpo eval --model runs/DATE-TIME/model
    grpo eval --model Qwen/Qwen2.5-1.5B-Instruct --dataset openai/gsm8k --num_generations_eval 8
    deepspeed --num_gpus 2 --module grpo.evaluate --model runs/DATE-TIME/model

The model is a folder or a hub id. A run's model is asked as in training, on that run's data, unless you set something
else: its grpo.yaml has the settings. The third command shares the problems among two processes. The data is whatever
the trainer takes (of a folder or a hub id the split `test`, of a single file all).

--reward_funcs reward the answers, as in training; a function that is a verdict decides whether an answer is right. The
numbers do not depend on the number of processes; the samples follow from seed and temperature.
"""

import time
from contextlib import ExitStack
from datetime import timedelta
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from grpo.config.command_line import parse_arguments
from grpo.config.console import end_now
from grpo.config.programs import EvaluateConfig
from grpo.data.dataset import is_mixture, is_one_split
from grpo.model.answering import model_settings
from grpo.run.exit import exit_code


def run(config: EvaluateConfig, closing: ExitStack) -> None:
    """Evaluate, print the table and write the folder. `closing` takes up what runs the user's code. Raises ConfigError,
    if possible before a model is loaded."""
    import torch.distributed as dist

    from grpo.agents.episodes import start_turns
    from grpo.data.prompts import check_reward_columns, load_examples
    from grpo.model.devices import refuse_shortage
    from grpo.model.load import check_lengths, load_end_ids, load_model, load_settings, load_tokenizer
    from grpo.model.pictures import load_processor
    from grpo.rewards.compute import load_reward_funcs, start_rewards
    from grpo.rewards.functions import TrainerState
    from grpo.run.collective import gather, own_place
    from grpo.run.run_folder import check_unused, check_writable
    from grpo.trainer.evaluation import check_verdicts, evaluate, with_pictures
    from grpo.trainer.rewarding import Rewarder, join_rewards

    rank, world_size, device = own_place()
    if world_size > 1:
        # For verdicts and texts only, so gloo on GPUs too. A rank may finish long before the last one.
        dist.init_process_group("gloo", timeout=timedelta(days=1))
    folder = Path(config.output).absolute() if config.output and rank == 0 else None  # a reward may move
    if folder is not None:
        check_unused("output", folder)
        check_writable("output", folder)
    functions = load_reward_funcs(config.reward_funcs)

    tokenizer, settings = load_tokenizer(config), load_settings(config)
    processor = load_processor(config, settings, tokenizer)
    check_lengths(config, settings)
    turns = start_turns(config, tokenizer, load_end_ids(config, settings, tokenizer))
    if turns is not None:
        closing.callback(turns.close)
    rewards = join_rewards(functions, {} if turns is None else turns.rewards)
    check_verdicts(config, rewards)
    split, limit = _split(config), config.eval_samples
    examples = load_examples(
        config, split, tokenizer, limit=limit, progress=rank == 0, processor=processor, turns=turns
    )
    check_reward_columns(config, examples, functions)
    if config.agent is not None:
        turns.try_on(examples[0])
    started, pool = start_rewards(functions, config, device, "evaluate")
    if pool is not None:
        closing.callback(pool.close)
    rewarder = Rewarder(rewards, started, config)
    sampler = _sampler(config, load_model(config, device), tokenizer, processor, turns)
    start = time.perf_counter()
    with refuse_shortage("sequences_per_generate", config.sequences_per_generate, "use a smaller one"):
        metrics, completions = evaluate(
            sampler, examples, rewarder, rank=rank, world_size=world_size, state=TrainerState()
        )
    metrics["eval_runtime"] = time.perf_counter() - start
    completions = list(chain.from_iterable(gather(completions))) if config.output else []
    if world_size > 1:
        dist.destroy_process_group()
    if rank == 0:
        print(table(config, metrics))
    if folder is not None:
        _write(folder, config, metrics, with_pictures(completions, examples))


def _sampler(config: EvaluateConfig, model, tokenizer, processor, turns):
    """Choose the sampler, continuous or by generate. Raises ConfigError if the memory is too small."""
    import torch

    from grpo.model.load import enough_memory
    from grpo.model.pictures import Vision
    from grpo.model.trial import make_batcher
    from grpo.sampling.self_check import make_sampler

    vision, packs = Vision(processor, model) if processor is not None else None, False
    with enough_memory(config):
        if config.sampler != "generate":
            with torch.no_grad():
                packs = make_batcher(model, tokenizer.pad_token_id, processor).packs
        return make_sampler(
            model,
            tokenizer,
            config.max_completion_length,
            rows=config.sequences_per_generate,
            packs=packs,
            vision=vision,
            turns=turns,
            cuda_graphs=config.cuda_graphs,
            fused_kernels=config.fused_kernels,
        )


def table(config: EvaluateConfig, metrics: dict[str, float]) -> str:
    data = config.dataset_name if _is_whole_file(config) else f"{config.dataset_name} ({config.dataset_test_split})"
    samples, temperature = config.num_generations_eval, config.eval_temperature or config.temperature
    number, percent, tokens = (3, 1, ""), (1, 100, " %"), (1, 1, "")
    by_function = [name for name in metrics if name.startswith("eval_rewards/")]
    rows = [
        ("accuracy, greedy", "eval_accuracy", percent),
        (f"avg@{samples}, temperature {temperature:g}", f"eval_avg@{samples}", percent),
        *((f"pass@{k}", f"eval_pass@{k}", percent) for k in config.ks),
        ("reward, greedy", "eval_reward", number),
        *((f"  {name.split('/', 1)[1].removesuffix('/mean')}", name, number) for name in by_function),
        ("format, greedy", "eval_format", percent),
        ("calls of tools, greedy", "eval_tools/call_frequency", number),
        ("  of them failed", "eval_tools/failure_frequency", percent),
        ("cut off, greedy", "eval_completions/clipped_ratio", percent),
        ("tokens a completion, greedy", "eval_completions/mean_length", tokens),
    ]
    lines = [f"{config.model_name_or_path} on {metrics['eval_n']} problems of {data}"]
    for label, name, (digits, scale, unit) in rows:
        if name in metrics:
            error = metrics.get(f"{name}_se")
            value = f"{scale * metrics[name]:{digits + 5}.{digits}f}{unit}"
            lines.append(f"  {label:<28}{value}" + (f" ± {scale * error:.{digits}f}" if error is not None else ""))
    count, seconds = metrics["eval_num_tokens"], metrics["eval_runtime"]
    return "\n".join([*lines, f"  {count:,} tokens in {seconds:.1f} s: {count / seconds:,.0f} a second"])


def _is_whole_file(config: EvaluateConfig) -> bool:
    is_whole = config.eval_holdout == 0 and "[" not in config.dataset_test_split and not is_mixture(config)
    return is_whole and is_one_split(config.dataset_name)


def _split(config: EvaluateConfig) -> str:
    """Return the split to load. A single file has none: it is loaded as the trainer loads its training data, whole."""
    return config.dataset_train_split if _is_whole_file(config) else config.dataset_test_split


def _write(folder: Path, config: EvaluateConfig, metrics: dict[str, float], completions: list[dict[str, Any]]) -> None:
    """Make the folder: config.yaml, metrics.json, completions.jsonl in the order of the problems, and pictures."""
    from grpo.config.command_line import write_config
    from grpo.run.run_folder import keep_pictures, to_json, writable

    with writable("output", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, folder / "config.yaml")
    with open(folder / "completions.jsonl", "w", encoding="utf-8") as file:
        for completion in keep_pictures(folder, sorted(completions, key=itemgetter("problem", "sample"))):
            file.write(to_json(completion))
    (folder / "metrics.json").write_text(to_json(metrics, indent=2), encoding="utf-8")


def main() -> int:
    from grpo.client.server_errors import ServerError
    from grpo.config.errors import RewardError, ending_at_ctrl_c, wake_main_thread

    with ending_at_ctrl_c():  # the hub may be asked
        config = parse_arguments(EvaluateConfig, __doc__, model_settings=model_settings)
    wake_main_thread()
    with ExitStack() as closing:  # also after Ctrl-C: the processes of calls that hang would stay
        return exit_code(lambda: run(config, closing), (RewardError, ServerError, OSError), "interrupted")


if __name__ == "__main__":
    end_now(main())  # also while a call hangs
