"""GRPO with the reference model in another process. Run it under the deepspeed launcher, ref_server.py beside it:

    CUDA_VISIBLE_DEVICES=7 python ref_server.py
    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6 deepspeed grpo_ref_split.py
    deepspeed --num_gpus 2 grpo_ref_split.py --config configs/demo_cpu.yaml      (no GPU: two CPU processes)

Read it from the top: `train` sets up and then is THE loop, in phase order. A step is one optimizer update, from
prompts_per_step prompts x num_generations completions over all ranks (grpo/trainer/step.py). A round
(grpo/trainer/round.py) draws, rewards and compares what steps_per_generation steps train on, num_iterations times each;
by default a round is a step, and each completion is used once, by the policy that drew it: the probability ratio is 1
and the clipping idle.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import warnings
from datetime import timedelta
from itertools import chain
from operator import itemgetter
from pathlib import Path

from grpo.config.command_line import parse_arguments
from grpo.config.trainer import TrainerConfig
from grpo.run.signals import Launcher, StopSignals

if __name__ == "__main__":
    LAUNCHER = Launcher()  # from the first moment on: a launcher may end while all this is imported
    CONFIG = parse_arguments(TrainerConfig, __doc__)  # before the heavy imports: --help and mistakes answer at once

import torch
import torch.distributed as dist
from tqdm import tqdm

import reward as reward_module
from grpo.algorithm.loss import adapt_beta, adapt_entropy_coef, applied_entropy_coef
from grpo.client.errors import ServersLost
from grpo.client.reference import ReferenceClient, ServerError, check_reference
from grpo.config.errors import ConfigError
from grpo.model.devices import describe_shared_cards, memory_of_others, prepare_nccl, wants_card
from grpo.model.fingerprint import describe
from grpo.model.load import check_lengths, checkpoint_activations, load_model, load_tokenizer
from grpo.model.logprobs import check_router
from grpo.model.lora import OwnReference, check_adapter, train_adapter
from grpo.model.optimizer import make_optimizer, make_schedule
from grpo.model.trial import make_batcher
from grpo.report.plots import draw_curves
from grpo.rewards.compute import RewardError, load_reward_funcs, start_rewards
from grpo.rollouts.prompts import PromptStream, check_reward_columns, load_examples
from grpo.rollouts.trial import make_sampler
from grpo.run.checkpoint_files import read_progress
from grpo.run.checkpoints import Checkpoints, Progress
from grpo.run.collective import gather, own_place
from grpo.run.exit import Stopped, exit_code
from grpo.run.folder import SaveError, save_model
from grpo.run.metrics import Stats, add_stats, gather_stats, step_metrics
from grpo.run.phase_clock import PhaseClock
from grpo.run.preflight import check_alike, given, open_run
from grpo.run.rearrange import LOAD_UNIVERSAL
from grpo.run.recorder import BAD_STEPS, Recorder, check_report_to
from grpo.run.watchdog import TIME_OUT, Watchdog
from grpo.trainer.dry_run import dry_run
from grpo.trainer.engine import engine_config, keep_gradients_apart
from grpo.trainer.evaluation import evaluate
from grpo.trainer.out_of_memory import EVALUATION, START, OutOfMemory, raise_if_short
from grpo.trainer.publish_weights import WeightPublisher, has_begun
from grpo.trainer.round import Rounds
from grpo.trainer.step import NothingLearned, update

if not wants_card():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it found none
# DeepSpeed's own calls, one line a rank. The barrier's, on GPUs, means the device that join_ranks has set.
warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context", UserWarning)
import deepspeed
from deepspeed.accelerator import cuda_accelerator

# With NVIDIA's library it reads CUDA_VISIBLE_DEVICES as numbers, where GPU-... and MIG-... may stand.
cuda_accelerator.pynvml = None

log = logging.getLogger("grpo_ref_split")

EVAL_RECORDED = 32  # held-out answers in the record of each evaluation


def train(
    config: TrainerConfig, launcher: Launcher, rank: int, world_size: int, device: torch.device, stalls: Watchdog
) -> None:
    """Set up, then loop. Raises ConfigError before a model is loaded wherever the mistake can be seen by then."""
    check_report_to(config)
    found_rewards = load_reward_funcs(config.reward_funcs)
    ds_config = engine_config(config, world_size, device)

    tokenizer = load_tokenizer(config)
    check_adapter(config)
    examples = load_examples(config, config.dataset_train_split, tokenizer, progress=rank == 0)
    check_reward_columns(config, examples)
    stream = PromptStream(examples, config.prompts_per_step, config.seed)
    held_out = []
    if config.eval_steps:
        held_out = load_examples(config, config.dataset_test_split, tokenizer, config.eval_samples, progress=rank == 0)

    check_alike(given(config, ds_config, found_rewards, [examples, held_out]))
    checkpoint, folder, done = open_run(config, rank, world_size)
    if done:
        if rank == 0:
            show_end(folder)
        dist.destroy_process_group()
        return
    goes_on = checkpoint is not None
    if goes_on and read_progress(checkpoint)["ranks"] != world_size:
        ds_config.setdefault("checkpoint", {}).update(LOAD_UNIVERSAL)
    client = ReferenceClient(config) if config.beta > 0 and config.ref == "server" else None
    if config.beta == 0:
        log.info("beta is 0: no KL term, no reference server")
    elif client is None:
        log.info("ref is adapter_off: no reference server")
    else:
        # Every rank asks: each keeps the fingerprint that all later answers must bear.
        reference = client.wait_ready(any_version=config.ref_update_steps > 0 and (goes_on or has_begun(folder)))
    reward_funcs = start_rewards(found_rewards, config, device)

    model = load_model(config, device)
    own = describe(model, tokenizer, config.model_name_or_path)
    check_lengths(config, model.config)
    if config.router_aux_loss_coef > 0:
        check_router(model, config.router_aux_loss_coef)
    check_alike({"the model's fingerprint": own.model_fingerprint})
    if client is not None:
        check_reference(config, own, reference)
    own_reference = None
    if config.use_peft:
        began_with_adapter = train_adapter(model, config)
        if config.beta > 0 and config.ref == "adapter_off":
            own_reference = OwnReference(model, began_with_adapter)
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    batcher = make_batcher(model, tokenizer.pad_token_id)
    sampler = make_sampler(model, tokenizer, config.max_completion_length)
    ref_updates = None
    if config.ref_update_steps:
        ref_updates = WeightPublisher(config, client, model, tokenizer, own, folder if rank == 0 else None)
    engine, schedule = start_engine(config, ds_config, model)
    collector = Rounds(config, engine.module, sampler, batcher, stream, reward_funcs, client, own_reference)

    asked = reference.model_fingerprint if client is not None else ""
    checkpoints = Checkpoints(config, folder, tokenizer, own.model_fingerprint, asked, examples, rank, world_size)
    progress = (
        checkpoints.load(checkpoint, engine) if goes_on else Progress(config.beta, config.entropy_coef, reference=asked)
    )
    if ref_updates and goes_on:
        ref_updates.go_on(progress.ref_step, progress.reference)
    elif ref_updates:
        ref_updates.begin(reference)
    collector.ask_again(progress.batches)
    stop = StopSignals(launcher)
    recorder = Recorder(config, folder, after=progress.step if goes_on else -1) if rank == 0 else None
    log.info(
        "%d prompts, %d held out; %d x %s; run folder %s%s",
        *(len(examples), len(held_out), world_size, device, folder),
        f"; goes on after step {progress.step}" if goes_on else "",
    )

    def evaluation(step: int) -> dict[str, float]:
        try:
            sampler.update_weights(step)
            numbers, completions = evaluate(
                sampler,
                held_out,
                reward_module.is_correct,
                reward_module.has_format,
                config,
                rank,
                world_size,
            )
        except (RuntimeError, MemoryError) as error:
            raise_if_short(error, f"{EVALUATION} after step {step}", EVALUATION, config, checkpoints.way_on())
            raise
        greedy = chain.from_iterable(gather([one for one in completions if one["sample"] == 0]))
        if recorder:
            recorder.completions(step, "eval", sorted(greedy, key=itemgetter("problem"))[:EVAL_RECORDED])
            tqdm.write(
                f"step {step}: held-out accuracy {numbers['eval_accuracy']:.3f} ± {numbers['eval_accuracy_se']:.3f} "
                f"(n={numbers['eval_n']}), format {numbers['eval_format']:.3f}"
                + "".join(f", pass@{k} {numbers[f'eval_pass@{k}']:.3f}" for k in config.ks),
                file=sys.stderr,
            )
        return numbers

    evaluated = evaluation(0) if held_out and progress.step == 0 else {}
    if recorder and evaluated:
        recorder.metrics(0, evaluated)

    steps = range(progress.step + 1, config.max_steps + 1)
    bar = tqdm(steps, desc="grpo", initial=progress.step, total=config.max_steps, disable=rank != 0)
    for step in bar:
        stalls.step, stalls.clock = step, (clock := PhaseClock())
        number, within = divmod(step - 1, config.updates_per_round)
        iteration, place = divmod(within, config.steps_per_generation)
        beta = progress.beta
        entropy_coef = applied_entropy_coef(progress.entropy_coef, progress.entropy, config)

        try:
            # Sample, reward while the reference is at work, and compare within each group.
            if progress.round != number:
                progress.batches, progress.resampled = collector.collect(number, step - 1, beta, clock)
                progress.round = number
            part = progress.batches[place]

            # Update; what the reference said is collected on the way, when the policy's own forward pass is done.
            with clock("update"):
                learning_rate = schedule.get_last_lr()[0]
                stats = update(engine, part.samples, config, batcher, clock, beta, entropy_coef, collector.requests)
        except ServersLost as lost:
            raise ServerError(f"{lost}; {checkpoints.leave(engine, progress)}") from lost
        except (RuntimeError, MemoryError) as error:
            phase = clock.open[-1] if clock.open else "update"
            raise_if_short(error, f"{phase} of step {step}", phase, config, checkpoints.way_on())
            raise

        # Every so often, between two rounds, the policy becomes the reference. After the last step nobody would ask it.
        of_reference, unpublished = {"ref_step": ref_updates.step} if ref_updates else {}, None
        if ref_updates and step % config.ref_update_steps == 0 and step < config.max_steps:
            progress.ref_step = step
            with clock("publish_ref"):
                try:
                    ref_updates.publish(step, needed=checkpoints.references())
                except ServersLost as lost:
                    unpublished = lost  # once this step is recorded

        # Log.
        rollouts = [rollout for group in part.groups for rollout in group.rollouts]
        add_stats(
            stats,
            {
                "reward": part.rewards,
                "reward_std_within_groups": [Stats.of(group).std for group in part.rewards],
                "frac_reward_zero_std": ~part.signal,
                **{f"rewards/{name}": row for name, row in zip(collector.reward_names, part.by_function, strict=True)},
                "length": [len(rollout.completion_ids) for rollout in rollouts],
                "terminated_length": [len(rollout.completion_ids) for rollout in rollouts if rollout.finished],
                "clipped_ratio": [not rollout.finished for rollout in rollouts],
                "tokens": [len(one.prompt_ids) + len(one.completion_ids) for one in part.samples],
                "sampling/policy_lag": [step - 1 - rollout.policy_version for rollout in rollouts],
                **clock.seconds,
                **clock.memory,
                "step_time": clock.total(),
                "signal": [stop.asked],
            },
        )
        everyone = gather_stats(stats)
        if iteration == 0:
            progress.num_tokens += int(everyone["tokens"].total)
        masked = "loss" not in everyone  # there was no token to train on
        progress.masked_steps += masked
        numbers = step_metrics(everyone, collector.reward_names) | {
            "grad_norm": 0.0 if masked else float(engine.get_global_grad_norm()),
            "learning_rate": learning_rate,
            "skipped_steps": engine.skipped_steps,
            "num_tokens": progress.num_tokens,
            **of_reference,
            "tokens_per_second": everyone["tokens"].total / everyone["step_time"].mean,
        }
        if config.max_resample:
            numbers["resampled_groups"] = progress.resampled
        if config.mask_truncated_completions:
            numbers["masked_steps"] = progress.masked_steps
        good = masked or engine.was_step_applied()
        rewarded = any(everyone[f"rewards/{name}"].count for name in reward_funcs or collector.reward_names)
        progress.bad_steps = [] if good and rewarded and not masked else [*progress.bad_steps, step]
        if config.kl_target is not None and "kl" in everyone:
            numbers["beta"] = beta
            if good:
                kl, completions = everyone["kl"].mean, everyone["length"].count
                progress.beta = adapt_beta(beta, kl, completions, config.kl_target, config.kl_horizon)

        if config.use_adaptive_entropy and good and not masked:
            progress.entropy = everyone["entropy_acted_on"].mean
            progress.entropy_coef = adapt_entropy_coef(progress.entropy_coef, progress.entropy, config)
        if config.use_adaptive_entropy or config.entropy_coef:
            numbers["entropy_coef"] = progress.entropy_coef  # the next step's, as TRL has it

        # Evaluate, record and save.
        last = step == config.max_steps
        progress.step, progress.accuracy = step, None
        if held_out and (last or step % config.eval_steps == 0):
            numbers |= (evaluated := evaluation(step))
            progress.accuracy = evaluated["eval_accuracy"]
        if recorder:
            recorder.metrics(step, numbers)
            recorder.completions(step, "train", part.to_lines(1))
            bar.set_postfix_str(
                f"reward {numbers['reward']:.2f}, accuracy {evaluated.get('eval_accuracy', '-'):.4}, "
                f"kl {numbers.get('kl', 0.0):.3f}, {numbers['tokens_per_second']:.0f} tokens/s, "
                f"reference {numbers.get('time/wait_ref', 0.0):.2f} s",
                refresh=False,
            )
        bad = [] if good else list(chain.from_iterable(gather(part.to_lines())))
        if recorder and bad:
            recorder.bad_step(step, bad)
            kept = f"its {len(bad)} completions are in {folder / BAD_STEPS}"
            log.warning("step %d is skipped: its loss or gradient is not finite; %s", step, kept)
        if recorder and masked:
            cut = f"all {everyone['length'].count} completions are cut at max_completion_length"
            log.warning("step %d does nothing: %s, and mask_truncated_completions leaves them out", step, cut)
        if recorder and not rewarded:
            log.warning("step %d has no reward: %s returned None for every completion", step, ", ".join(reward_funcs))
        if config.save_steps and step % config.save_steps == 0:
            checkpoints.save(engine, progress)
        if unpublished:
            raise ServerError(f"{unpublished}; {checkpoints.leave(engine, progress)}") from unpublished
        if progress.bad_steps and len(progress.bad_steps) % config.max_bad_steps == 0:
            if masked:
                reason = (
                    f"every completion of the last was cut at max_completion_length={config.max_completion_length}: "
                    "begin a new run with a larger one, or without mask_truncated_completions"
                )
            elif good:
                reason = (
                    f"in the last {', '.join(reward_funcs)} returned None for every completion: read some in "
                    f"{folder / 'completions.jsonl'}, and make sure that one of the functions applies to them"
                )
            else:
                reason = (
                    "the loss or gradient of the last was not finite, so it was not applied: completions are in "
                    f"{folder / BAD_STEPS}, look there for rewards out of scale, or begin a new run with a lower "
                    "learning_rate"
                )
            raise NothingLearned(
                f"steps {', '.join(map(str, progress.bad_steps))} taught the policy nothing: {reason}; "
                f"{checkpoints.leave(engine, progress)}"
            )
        if (signalled := int(everyone["signal"].high)) and not last:
            raise Stopped(f"stopped by signal {signalled}; {checkpoints.leave(engine, progress)}", signalled)

    if recorder:
        save_model(engine.module, tokenizer, folder / "model", config.merge_on_save, config.max_steps)
    stalls.close()
    dist.barrier()  # nobody leaves while rank 0 may still need the others' sockets
    if client is not None:
        client.close()
    if recorder:
        recorder.close()
        show_end(folder)
    dist.destroy_process_group()


def show_end(folder: Path) -> None:
    """Draw the curves and say where everything is. The model is there: without curves the run has succeeded too."""
    try:
        log.info("done: model in %s, curves in %s", folder / "model", draw_curves(folder))
    except (OSError, ConfigError) as error:
        log.warning("the curves could not be drawn: %s; 'python -m grpo.report %s' shows them", error, folder)
        log.info("done: model in %s", folder / "model")


def run(config: TrainerConfig, launcher: Launcher) -> None:
    """Join the other ranks, and train. Raises ConfigError as join_ranks, and what `train` raises."""
    rank, world_size, device, stalls = join_ranks(config)
    try:
        train(config, launcher, rank, world_size, device, stalls)
    finally:
        stalls.close()  # torch prints a traceback of its own where rank 0 cannot be told any more


def join_ranks(config: TrainerConfig) -> tuple[int, int, torch.device, Watchdog]:
    """Meet the other ranks. Returns (rank, world size, device, who watches them).

    Raises ConfigError if the step cannot be shared, or a card cannot be used.
    """
    rank, world_size, device = own_place()
    config.check_ranks(world_size)
    if "RANK" not in os.environ:  # plain python instead of the deepspeed launcher: one rank
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    if device.type == "cpu":
        # An operation that only DeepSpeed's inference uses, and that costs a minute of C++ compiling on a CPU.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    held = memory_of_others(device)
    stalls = Watchdog(rank, world_size, hint=prepare_nccl() if device.type == "cuda" else "")
    deepspeed.init_distributed(verbose=False, timeout=patience(config))
    shared = describe_shared_cards(gather(held))
    stalls.met = True
    if shared:
        log.warning("%s", shared)
    return rank, world_size, device, stalls


def patience(config: TrainerConfig) -> timedelta:
    """How long a collective may take: a rank may wait for the reference while the others wait for that rank."""
    return timedelta(seconds=TIME_OUT + config.ref_deadline)


def start_engine(config: TrainerConfig, ds_config: dict, model: torch.nn.Module):
    """The DeepSpeed engine around the policy, and the learning-rate schedule that it steps."""
    keep_gradients_apart(ds_config["zero_optimization"], model)
    optimizer = make_optimizer(model, config)
    schedule = make_schedule(optimizer, config)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=ds_config)
    except (RuntimeError, MemoryError) as error:
        raise_if_short(error, START, START, config, "nothing is lost: no step was done")
        raise
    # DeepSpeed times each forward pass of the whole model. The update calls the model's body, so what it times is each
    # sampled token, and from the third step on its timer waits for the device before each.
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    # ZeRO reduces in a group of its own, which DeepSpeed makes with torch's time-out: 10 minutes on GPUs.
    dist.distributed_c10d._set_pg_timeout(patience(config), engine.seq_data_parallel_group)
    return engine, schedule


if __name__ == "__main__":
    code = 1
    try:
        code = exit_code(
            lambda: dry_run(CONFIG) if CONFIG.dry_run else run(CONFIG, LAUNCHER),
            (ServerError, RewardError, SaveError, NothingLearned, OutOfMemory, OSError),
            "interrupted before the first step",
        )
    except Exception:
        sys.excepthook(*sys.exc_info())
    if code == 0:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Python waits for threads: one that a reward function left, or that waits for the reference, must not keep the
    # process alive.
    os._exit(code)
