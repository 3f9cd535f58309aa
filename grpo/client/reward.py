"""The client of a reward model on a server of its own (python ref_server.py --task reward)."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np

from grpo.client.base import TaskClient
from grpo.config.connection import ClientConfig
from grpo.wire.rewards import Message, RewardAnswer, RewardRequest

_CHATS_PER_REQUEST = 16  # few enough that a request which fails is cheap to send again


class RewardClient(TaskClient):
    """The client of one reward server: chats go out, scores come back. Tokenizer and template are the server's."""

    def __init__(self, config: ClientConfig, url: str, run: str = ""):
        super().__init__(config, "reward", [url], wanted="scores", run=run)
        self._url = url

    def wait_ready(self) -> None:
        """Wait until the server is ready. Raises ServersUnavailable, ServerError as `wait_for_servers`."""
        servers = self.wait_for_servers(
            "reward", "'python ref_server.py --task reward' there, or name it in reward_funcs where it is"
        )
        self.connection.fingerprint = servers[self._url].model.fingerprint

    async def score(self, conversations: list[list[Message]]) -> list[float]:
        """Return one float32 per conversation. Raises ServerError where the server refuses them, or is too late."""
        futures = []
        for start in range(0, len(conversations), _CHATS_PER_REQUEST):
            chats = conversations[start : start + _CHATS_PER_REQUEST]
            request = RewardRequest(chats, f"completions {start} and on", self._client_id)
            futures.append(self._threads.submit(self._get_scores, request))
        answers = await asyncio.gather(*map(asyncio.wrap_future, futures))
        return [score for scores in answers for score in scores.tolist()]

    def _get_scores(self, request: RewardRequest) -> np.ndarray:
        body, decode = request.to_json(), partial(RewardAnswer.from_json, inputs=len(request.inputs))
        return self.balancer.send(body, decode, len(body), request.request_id).scores
