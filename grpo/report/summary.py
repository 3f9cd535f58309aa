"""Makes the table at the end of a run: its first and its last numbers, and the next commands."""

import shlex
from pathlib import Path

from grpo.config.loss_settings import is_users_own
from grpo.report.read import RecordedRun, read_run
from grpo.run.run_folder import with_error

_HELD_OUT = {
    "accuracy": "eval_accuracy",
    "reward": "eval_reward",
    "format": "eval_format",
    "tokens per completion": "eval_completions/mean_length",
}
_TRAINING = {
    "mean reward": "reward",
    "KL to the reference": "kl",
    "tokens per completion": "completions/mean_length",
    "cut at max_completion_length": "completions/clipped_ratio",
}


def summary(folder: Path) -> str:
    """Return the table of the run in `folder`. Raises ConfigError if it has no step."""
    run = read_run(folder)
    evaluated = [row for row in run.rows.values() if "eval_n" in row]
    trained = [row for row in run.rows.values() if "num_tokens" in row]
    lines: list[str] = []
    if len(evaluated) > 1:
        title = f"{evaluated[0]['eval_n']:.0f} held-out problems, greedy"
        lines += _table(title, "before", "after", _HELD_OUT, evaluated)
    if trained:
        lines += _table("training, sampled", "first step", "last step", _TRAINING, trained)
    seconds = sum(row.get("step_time", 0.0) for row in run.rows.values())
    lines.append(f"{max(run.rows)} steps, {trained[-1]['num_tokens']:,.0f} tokens, {duration(seconds)} in steps.")
    return "\n".join(lines + _next_commands(run))


def _table(title: str, left: str, right: str, names: dict[str, str], rows: list[dict[str, float]]) -> list[str]:
    first, last = rows[0], rows[-1]
    return [f"{title:34} {left:>15} {right:>15}"] + [
        f"  {label:32} {with_error(first, name):>15} {with_error(last, name):>15}"
        for label, name in names.items()
        if name in first and name in last
    ]


def duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def _next_commands(run: RecordedRun) -> list[str]:
    folder, code = shlex.quote(str(run.folder)), ""
    if tools := run.settings.get("tools"):
        code += f" --tools {shlex.join(map(str, tools))}"
    if environment := run.settings.get("environment"):
        code += f" --environment {shlex.quote(str(environment))}"
    rewards, names = "", list(map(str, run.settings.get("reward_funcs") or []))
    if any(map(is_users_own, names)):  # evaluation does not take these from the model's folder, nor then their weights
        rewards = f" --reward_funcs {shlex.join(names)}"
        if set(weights := run.settings.get("reward_weights") or []) - {1}:
            rewards += f" --reward_weights {shlex.join(map(str, weights))}"
    return [
        f"talk to it:    grpo chat --model {folder}/model{code}",
        f"evaluate it:   grpo eval --model {folder}/model{code}{rewards}",
        f"serve it:      as {folder}/model/README.md says",
        f"see its page:  grpo report {folder}",
    ]
