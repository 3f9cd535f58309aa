"""What the first rank tells a pool: the run, each version of the policy, and which versions may go."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.client.errors import RequestFailure, ServerError, ServersLost
from grpo.client.patience import Patience
from grpo.client.pool import PoolClient
from grpo.config.trainer import TrainerConfig
from grpo.model.load import eos_token_ids
from grpo.run.checkpoints import Checkpoints
from grpo.trainer.publish_policy import PolicyPublisher, model_files
from grpo.turns.start import UserTurns
from grpo.wire.rollouts import MOST_TASKS, RunInfo
from grpo.wire.turns import SETTINGS, RunTurns

log = logging.getLogger(__name__)


class PoolRun:
    """The run as the pool knows it. Rank 0 alone has one."""

    def __init__(
        self,
        config: TrainerConfig,
        pool: PoolClient,
        ask: Patience,
        publisher: PolicyPublisher,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        checkpoints: Checkpoints,
        turns: UserTurns | None,
    ):
        """`name` is the run's on pages and in logs. `turns` are the trainer's, which its workers' must be like."""
        self._config, self._pool, self._ask, self._publisher = config, pool, ask, publisher
        self._checkpoints = checkpoints
        self._needed, self._is_begun = 0, False
        self._files = model_files(model, tokenizer)
        self._run = RunInfo(
            run=checkpoints.identity(),
            name=name,
            vocab_size=model.get_input_embeddings().weight.shape[0],
            eos_token_ids=eos_token_ids(model, tokenizer),
            num_generations=config.num_generations,
            max_completion_length=config.max_completion_length,
            temperature=config.temperature,
            seed=config.seed,
            model_files=hashlib.sha256(self._files).hexdigest(),
            groups_per_round=config.prompts_per_step * config.steps_per_generation,
            in_flight_weight_updates=config.in_flight_weight_updates,
            turns=None if turns is None else _describe(turns, config),
        )

    def publish(self, version: int, number: int) -> None:
        """Publish this version of the policy, with which round `number` begins.

        Returns when the pool has the version that draws that round; what it had of an earlier start of the run that had
        other bits is gone then. Raises ServerError where the pool is away for too long, refuses the run, or lacks a
        version that only it had; SaveError; Stopped.
        """
        draws_this_round = self._config.version_of_round(number) == version
        if not self._is_begun:
            self._begin(version, number)
            if not (draws_this_round or self._run.in_flight_weight_updates):  # else this version can draw it too
                self._check_version(number)
            self._is_begun = True
        self._release()
        if not draws_this_round:
            self._publisher.wait()  # for the version that draws this round
        # An earlier start's versions, from this one on, may have drawn tokens of this round, and go where they differ.
        earlier = self._ask(self._pool.versions) if self._run.in_flight_weight_updates else []
        self._publisher.publish(version)
        if draws_this_round or any(known.version >= version for known in earlier):
            self._publisher.wait()

    def end_step(self, drifts: list[tuple[int, float, int]]) -> None:
        """Tell the pool how far workers' log-probs are from the policy's: StepResult.drifts.

        Returns when the last version is in the run's folder: a checkpoint of this step may need it.
        """
        self._publisher.wait_written()
        try:
            for start in range(0, len(drifts), MOST_TASKS):
                self._pool.report_drift(drifts[start : start + MOST_TASKS])
        except RequestFailure as failure:  # the next step says it again
            log.debug("the pool %s was not told of drift: %s", self._pool.url, failure)
        except ServerError as error:  # the next round ends the run for it, on all ranks
            log.warning("the pool %s was not told of drift: %s", self._pool.url, error)

    def close(self) -> None:
        self._publisher.close()

    def _begin(self, version: int, number: int) -> None:
        """Tell the pool the run, and send what all its versions share, and what an earlier start left to be sent.

        Raises what `publish` raises.
        """
        base = self._publisher.write_base()
        if base is not None:
            self._run = replace(self._run, base_weights=base[1])
        # The run first: the file of another one stays as it is.
        self._ask(lambda: self._pool.put_run(self._run))
        self._ask(lambda: self._pool.send_file(self._files, self._run.model_files))
        if base is not None:
            self._ask(lambda: self._pool.send_file(*base))
            base[0].unlink()
        self._publisher.send_left(self._config.version_of_round(number), version)

    def _release(self) -> None:
        """Let the pool drop what no start of the run will need."""
        config = self._config
        needed = config.version_of_round(-(-self._checkpoints.oldest() // config.updates_per_round))
        if needed > self._needed:
            self._ask(lambda: self._pool.needed(needed))
            self._needed = needed

    def _check_version(self, number: int) -> None:
        """Raise ServersLost where the pool has neither the groups of this round nor the version that draws them."""
        version = self._config.version_of_round(number)
        known = {version.version for version in self._ask(self._pool.versions)}
        rows = self._ask(self._pool.status)["rounds"]
        is_drawn = any(row["round"] == number and row["drawn"] >= self._run.groups_per_round for row in rows)
        if not is_drawn and version not in known:
            raise ServersLost(
                f"{self._pool.url} lacks version {version} of the policy, which draws round {number} and which the run "
                "has no more: start the pool with the pool_file that it had, or begin again with a new one"
            )


def _describe(turns: UserTurns, config: TrainerConfig) -> RunTurns:
    settings = {name: getattr(config, name) for name in SETTINGS}
    return RunTurns.of(turns.tools, config.environment, [*turns.rewards], **settings)
