"""A reward model in the trainer's process."""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo.config.trainer import TrainerConfig
from grpo.model.reward_model import PADDED, describe_reward, load_reward_model, sequence_scores, tokenize
from grpo.rewards.functions import RewardError
from grpo.wire.errors import ProtocolError
from grpo.wire.rewards import Message


class RewardModel:
    """In the trainer, frozen, on the rank's device."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_tokens: int):
        self._name, self._model, self._tokenizer, self._budget = name, model, tokenizer, batch_tokens
        self._longest = describe_reward(model, tokenizer, name).max_length

    @classmethod
    def load(cls, config: TrainerConfig, name: str, device: torch.device) -> RewardModel:
        """Its batches are as large as those of an update. Raises ConfigError where there is no such reward model."""
        return cls(name, *load_reward_model(config, "reward_funcs", name, device), config.micro_batch_tokens)

    def score(self, conversations: list[list[Message]]) -> list[float]:
        """One float32 a conversation. Raises RewardError for one that the model cannot take."""
        try:
            texts = list(tokenize(self._tokenizer, conversations, self._longest))
        except ProtocolError as error:
            raise RewardError(f"the reward model {self._name} cannot score a completion: {error}") from error
        scores = np.zeros(len(texts), np.float32)
        for rows in PADDED.cut([(text, []) for text in texts], self._budget):
            scores[rows] = sequence_scores(self._model, [texts[row] for row in rows])
        return scores.tolist()
