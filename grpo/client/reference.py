"""The trainer's side of the wire: groups go out the moment they are generated, log-probs come back when they are ready.

A request is stateless, so it is simply sent again, to another server if there is one, until one answers or the deadline
is over: a server that is killed and restarted costs time and nothing else.
"""

from __future__ import annotations

import logging
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from grpo.client.balancer import IN_FLIGHT, Balancer, Deadline, list_outcomes
from grpo.client.connection import Connection, WeightsToSend
from grpo.client.errors import ModelLoading, RequestFailed, ServerError, ServersUnavailable
from grpo.config.trainer import TrainerConfig
from grpo.wire.health import ModelInfo, ServerInfo
from grpo.wire.logprobs import LogprobsRequest, decode_answer, encode_request
from grpo.wire.rewards import Message, RewardAnswer, RewardRequest

log = logging.getLogger(__name__)

LONGEST_LOADING = 6 * 3600.0
"""seconds: 140 GB at 10 MB/s take four hours; a server that hangs while it loads holds the trainer's cards so long"""


def check_reference(config: TrainerConfig, policy: ModelInfo, reference: ModelInfo) -> None:
    """Refuse a reference whose token ids mean something else than the policy's, or that takes shorter sequences.

    Raises ServerError. Other weights are allowed (training may go on from a fine-tuned model), and said.
    """
    urls = " ".join(config.ref_servers)
    restart = f"restart it with --model_name_or_path {config.model_name_or_path}"
    if reference.tokenizer_fingerprint != policy.tokenizer_fingerprint:
        raise ServerError(f"{urls} serves {reference.name}, whose tokenizer is not that of {policy.name}: {restart}")
    if reference.vocab_size != policy.vocab_size:
        raise ServerError(
            f"{urls} serves {reference.name} with a vocabulary of {reference.vocab_size}, and {policy.name} has "
            f"{policy.vocab_size}: {restart}"
        )
    if config.longest_sequence > reference.max_length:
        raise ServerError(
            f"{urls} takes at most {reference.max_length} tokens a sequence, and max_prompt_length + "
            f"max_completion_length is {config.longest_sequence}: restart it with a larger --max_length, or lower one "
            "of them"
        )
    if config.ref_update_steps and reference.config_fingerprint != policy.config_fingerprint:
        raise ServerError(
            f"{urls} serves {reference.name}, whose configuration is not that of {policy.name}, so it cannot take "
            f"these weights: {restart}, or set ref_update_steps to 0"
        )
    if config.quantization not in ("none", reference.quantization):
        raise ServerError(
            f"{urls} serves {reference.name} with quantization {reference.quantization}, and that of the policy is "
            f"{config.quantization}, so the KL would not begin at 0: restart it with --quantization "
            f"{config.quantization}, or use ref adapter_off"
        )
    if reference.fingerprint != policy.fingerprint:
        log.warning(
            "the reference (%s) is another model than the policy starts from (%s): the KL will not begin at 0",
            reference.name,
            policy.name,
        )


class ReferenceClient:
    """Sends groups to the reference servers from threads of its own. Close it when the run ends.

    Given a URL instead, it is a reward model's: texts go there, and one server is all there is.
    """

    def __init__(self, config: TrainerConfig, reward_url: str | None = None):
        """Raises ServerError if `ref_ca_file` holds no certificate."""
        self._config, self._reward_url = config, reward_url
        self._name = uuid.uuid4().hex  # the server serves clients in turn
        self._wire = Connection(config, "reward" if reward_url else "logprobs")
        urls, sought = ([reward_url], "scores") if reward_url else (config.ref_servers, "log-probs")
        self._servers = Balancer(self._wire, urls, sought, config.ref_deadline)
        # Room for all that may be in flight: the threads that wait for one server are never those that another needs.
        self._threads = ThreadPoolExecutor(IN_FLIGHT * len(urls), thread_name_prefix="reference")

    def wait_ready(self, any_version: bool = False) -> ModelInfo:
        """Wait until every server is ready and check that all serve the same model; return it.

        With `any_version` each may have another of this run's references: `publish` or `expect` says which it is.

        Says each minute what it waits for, and more often at first. A server that says that it loads is waited for, up
        to six hours; `ref_startup_timeout` is for one that says nothing of the kind.

        Raises ServersUnavailable after that time, ServerError for a refused token, a certificate that does not verify,
        or differing models.
        """
        began, patience, next_word = time.monotonic(), self._config.ref_startup_timeout, 5.0
        deadlines = {server: Deadline(patience) for server in self._servers.servers}
        healths: dict[str, ServerInfo] = {}
        waiting = self._servers.servers
        while True:
            passed = time.monotonic() - began
            for server in waiting:
                try:
                    healths[server.url] = self._wire.health(server.url)
                except RequestFailed as failure:
                    server.last_outcome = str(failure)
                    if isinstance(failure, ModelLoading):
                        deadlines[server] = Deadline(patience)
                        if passed > LONGEST_LOADING:
                            raise ServersUnavailable(
                                f"{server.url} has been loading its model for {passed:.0f} s: see its log, and start "
                                "it again"
                            ) from failure
            waiting = [server for server in waiting if server.url not in healths]
            if not waiting:
                break
            if silent := [server for server in waiting if deadlines[server].seconds_left() <= 0]:
                if self._reward_url:
                    raise ServersUnavailable(
                        f"no reward server at {list_outcomes(silent)} after {patience:.0f} s: start 'python "
                        "ref_server.py --task reward' there, or name it in reward_funcs where it is"
                    )
                raise ServersUnavailable(
                    f"no reference server at {list_outcomes(silent)} after {patience:.0f} s: start 'python "
                    f"ref_server.py --model_name_or_path {self._config.model_name_or_path}' there, or set ref_servers "
                    "to where it is, or beta to 0 to train without"
                )
            if passed >= next_word:
                log.info("waiting for %s (%.0f s)", list_outcomes(waiting), passed)
                next_word = passed + min(60.0, max(15.0, passed))
            time.sleep(min(0.5, max(0.0, min(deadlines[server].seconds_left() for server in waiting))))
        first_url = self._servers.servers[0].url
        first = healths[first_url].model
        for url, other in healths.items():
            if other.model.fingerprint != first.fingerprint and not any_version:
                raise ServerError(
                    f"{first_url} serves {first.name} ({first.fingerprint}) but {url} serves "
                    f"{other.model.name} ({other.model.fingerprint}): start every server with the same model"
                )
            if self._config.ref_update_steps and not self._reward_url and not other.takes_updates:
                raise ServerError(
                    f"{url} takes no new weights: restart it with --update_folder PATH, or set ref_update_steps to 0"
                )
        self._wire.fingerprint = first.fingerprint
        if any_version:
            self._wire.outdated.update(one.model.fingerprint for one in healths.values())
        return first

    def expect(self, fingerprint: str) -> None:
        """As Balancer.use_only."""
        self._servers.use_only(fingerprint)

    def publish(self, reference: WeightsToSend) -> None:
        """As Balancer.send_weights."""
        self._servers.send_weights(reference)

    def submit(self, prompt_ids: list[int], completions: list[list[int]], name: str) -> Future[list[np.ndarray]]:
        """Ask for the log-probs of one prompt's completions; returns at once.

        The future gives float32 [len(completion)] for each, or raises ServerError.
        """
        request = LogprobsRequest.of(prompt_ids, completions, self._config.temperature, name, self._name)
        return self._threads.submit(self._score, request)

    def submit_texts(self, chats: list[list[Message]], name: str) -> Future[np.ndarray]:
        """Ask for the scores of chats; returns at once. The future gives float32 [len(chats)], or ServerError."""
        return self._threads.submit(self._judge, RewardRequest(chats, name, self._name))

    def close(self) -> None:
        """Send nothing more; what still waits raises ServerError. A thread whose request is under way ends with it."""
        self._servers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _score(self, request: LogprobsRequest) -> list[np.ndarray]:
        tokens = int(request.completion_lengths.sum())
        body, decode = encode_request(request), partial(decode_answer, tokens=tokens)
        logprobs = self._servers.send(body, decode, len(request.input_ids), request.request_id).logprobs
        return np.split(logprobs, np.cumsum(request.completion_lengths)[:-1])

    def _judge(self, request: RewardRequest) -> np.ndarray:
        body, decode = request.to_json(), partial(RewardAnswer.from_json, inputs=len(request.inputs))
        return self._servers.send(body, decode, len(body), request.request_id).scores
