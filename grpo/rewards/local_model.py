"""A reward model in the trainer's process."""

from __future__ import annotations

import numpy as np
import torch

from grpo.config.errors import RewardError
from grpo.config.evaluate import EvaluateConfig
from grpo.config.trainer import TrainerConfig
from grpo.model.reward_model import PADDED, describe_reward, load_reward_model, sequence_scores, tokenize
from grpo.wire.errors import ProtocolError
from grpo.wire.rewards import Message


class RewardModel:
    """A frozen reward model on the rank's device. Its batches are as large as an update's."""

    def __init__(self, config: TrainerConfig | EvaluateConfig, name: str, device: torch.device):
        """Load the model. Raises ConfigError where `name`, a folder or hub id, is no reward model."""
        self._name, self._batch_tokens = name, config.micro_batch_tokens
        self._model, self._tokenizer = load_reward_model(config, "reward_funcs", name, device)
        self._max_length = describe_reward(self._model, self._tokenizer, name).max_length

    def score(self, conversations: list[list[Message]]) -> list[float]:
        """Return one float32 per conversation. Raises RewardError for one that the model cannot take."""
        try:
            texts = list(tokenize(self._tokenizer, conversations, self._max_length))
        except ProtocolError as error:
            raise RewardError(f"the reward model {self._name} cannot score a completion: {error}") from error
        scores = np.zeros(len(texts), np.float32)
        for rows in PADDED.cut([(text, []) for text in texts], self._batch_tokens):
            scores[rows] = sequence_scores(self._model, [texts[row] for row in rows])
        return scores.tolist()
