"""A reward model on a server of its own (python ref_server.py --task reward), as a reward."""

from __future__ import annotations

import asyncio

from grpo.client.reference import ReferenceClient
from grpo.config.trainer import TrainerConfig
from grpo.wire.rewards import Message

_TOGETHER = 16  # chats in a request: few enough for one that fails to be sent again cheaply


class RewardClient:
    """Texts go up, scores come down; tokenizer and chat template are the server's."""

    def __init__(self, config: TrainerConfig, url: str):
        """Waits until the server is ready. Raises ServerError where it is none, or serves something else."""
        self._client = ReferenceClient(config, url)
        self._client.wait_ready()

    async def scores(self, conversations: list[list[Message]]) -> list[float]:
        """One float32 a conversation. Raises ServerError where the server refuses them, or does not answer in time."""
        starts = range(0, len(conversations), _TOGETHER)
        asked = [
            self._client.submit_texts(conversations[start : start + _TOGETHER], f"completions {start} and on")
            for start in starts
        ]
        answers = await asyncio.gather(*map(asyncio.wrap_future, asked))
        return [score for answer in answers for score in answer.tolist()]
