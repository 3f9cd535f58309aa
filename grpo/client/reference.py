"""The clients of servers that score completions, and of a reward model's server (ref_server.py --task reward).

A request is stateless. It is sent again, to another server if there is one, until a server answers or the deadline
passes: a server that is killed and restarted costs time and nothing else.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice

import numpy as np

from grpo.client.balancer import IN_FLIGHT, Balancer, list_outcomes
from grpo.client.connection import Connection
from grpo.client.server_errors import ModelLoading, RequestFailure, RequestRefused, ServerError, ServersUnavailable
from grpo.config.connection_settings import ClientConfig
from grpo.config.errors import rank_count
from grpo.config.trainer import TrainerConfig
from grpo.wire.health import ModelInfo, ServerInfo
from grpo.wire.logprobs import LogprobsRequest, decode_answer, encode_request
from grpo.wire.rewards import Message, RewardAnswer, RewardRequest

log = logging.getLogger(__name__)

LONGEST_LOADING = 6 * 3600.0
"""seconds: 140 GB at 10 MB/s take four hours; a server that hangs while it loads holds the trainer's cards so long"""
FIRST_LINE, BETWEEN_LINES = 5.0, 15.0  # seconds of waiting to the first line of the log, and at least to the next
SHARED_TOKENS = 4096  # of a request of several groups: larger ones gain little, and servers share them better

_Asked = tuple[LogprobsRequest, Future[list[np.ndarray]]]


class TaskClient:
    """The servers of one task, and the threads that send requests to them. Close it when the run ends."""

    def __init__(self, config: ClientConfig, task: str, urls: list[str], wanted: str, run: str):
        """`wanted` names the answers in messages, `run` the client's run on pages. Raises as open_sessions."""
        self._config = config
        self._client_id = make_client_name(run)  # servers serve their clients in turn
        self.connection = Connection(config, task)
        self.balancer = Balancer(self.connection, urls, wanted, config.ref_deadline)
        # Room for all that may be in flight: the threads that wait for one server are never those that another needs.
        self._threads = ThreadPoolExecutor(IN_FLIGHT * len(urls), thread_name_prefix=f"{task}-client")

    def close(self) -> None:
        """Send nothing more: waiting requests raise ServerError. A thread whose request is in flight ends with it."""
        self.balancer.close()
        self._threads.shutdown(wait=False)

    def wait_for_servers(self, kind: str, remedy: str) -> dict[str, ServerInfo]:
        """Wait until every server is ready; return their descriptions by URL. `remedy` ends the message. Logs each
        minute, more often at first, which servers it waits for. A server that is loading its model has LONGEST_LOADING
        seconds, any other `ref_startup_timeout`. Raises ServersUnavailable after that time, ServerError for a refused
        token or certificate."""
        began, patience, next_log = time.monotonic(), self._config.ref_startup_timeout, FIRST_LINE
        deadlines = dict.fromkeys(self.balancer.servers, began + patience)
        answers: dict[str, ServerInfo] = {}
        waiting, hint = self.balancer.servers, f": start {remedy}"
        while True:
            passed = time.monotonic() - began
            for server in waiting:
                try:
                    answers[server.url] = self.connection.health(server.url)
                except RequestFailure as failure:
                    server.last_outcome = str(failure)
                    if isinstance(failure, ModelLoading):
                        hint, deadlines[server] = "", time.monotonic() + patience
                        if passed > LONGEST_LOADING:
                            loading = f"{server.url} has been loading its model for {passed:.0f} s"
                            raise ServersUnavailable(f"{loading}: see its log, and start it again") from failure
            waiting = [server for server in waiting if server.url not in answers]
            if not waiting:
                pages = " or ".join(f"{url}/" for url in answers)
                log.info("the %s server is ready; to watch it, open %s in a browser", kind, pages)
                return answers
            now = time.monotonic()
            if silent := [server for server in waiting if deadlines[server] <= now]:
                missing = f"no {kind} server at {list_outcomes(silent)} after {patience:.0f} s"
                raise ServersUnavailable(f"{missing}: start {remedy}")
            if passed >= next_log:
                log.info("waiting for %s (%.0f s)%s", list_outcomes(waiting), passed, hint)
                hint, next_log = "", passed + min(60.0, max(BETWEEN_LINES, passed))
            time.sleep(min(0.5, min(deadlines[server] for server in waiting) - now))


def make_client_name(run: str) -> str:
    """Return a name that people can read and no other client has: "RUN, rank R of N, HOST #random". It has 128
    characters at most, as docs/protocol.md wants it. Without a run it begins with the rank."""
    place = f"rank {os.environ.get('RANK', '0')} of {rank_count()}, {socket.gethostname()[:32]}"
    name = f"{run[:48]}, {place}" if run else place
    # The name of a folder may hold bytes that are no text.
    return f"{name} #{secrets.token_hex(4)}".encode("utf-8", "replace").decode()


def check_reference(
    config: TrainerConfig, policy: ModelInfo, reference: ModelInfo, *, any_version=False, has_pictures=False
) -> None:
    """Raise ServerError for a reference of another model than the policy starts from, or of shorter sequences. With
    `has_pictures` also for a reference without pictures: a text model's, or an older program. Another model with the
    policy's tokenizer and processor is accepted with `allow_other_reference`, and with `any_version`, when it may be a
    later reference of this run."""
    urls, restart = " ".join(config.ref_servers), f"restart it with --model_name_or_path {config.model_name_or_path}"

    def error(fault: str) -> ServerError:
        return ServerError(f"{urls} serves {reference.name}{fault}")

    if has_pictures and not reference.processor_fingerprint:
        raise error(f" without pictures, and prompts of this run have some: {restart}, of the trainer's version")
    processors = {policy.processor_fingerprint, reference.processor_fingerprint}
    may_differ = "" in processors or (config.allow_other_reference and not has_pictures)
    if len(processors) > 1 and not may_differ:
        limits = " and ".join(f"{name} {getattr(config, name) or 'unset'}" for name in ("min_pixels", "max_pixels"))
        remedy = f"restart it with the trainer's settings, {limits}, and the same preprocessor_config.json"
        raise error(f" and prepares pictures in another way than this run: {remedy}")
    same_tokens = reference.tokenizer_fingerprint == policy.tokenizer_fingerprint
    if not same_tokens or reference.vocab_size != policy.vocab_size:
        sizes = f"{reference.vocab_size} is not that of {policy.name}, {policy.vocab_size}"
        raise error(f", whose vocabulary of {sizes}: {restart}")
    if config.longest_sequence > reference.max_length:
        longest = f"max_prompt_length + max_completion_length is {config.longest_sequence}"
        remedy = "restart it with a larger --max_length, or lower one"
        raise error(f" and takes at most {reference.max_length} tokens a sequence, and {longest}: {remedy}")
    has_config = reference.config_fingerprint == policy.config_fingerprint
    if config.ref_update_steps and not has_config:
        reason = f"whose configuration is not that of {policy.name}, so it cannot take these weights"
        raise error(f", {reason}: {restart}, or set ref_update_steps to 0")
    if config.quantization not in ("none", reference.quantization):
        difference = f"{reference.quantization}, and that of the policy is {config.quantization}"
        remedy = f"restart it with --quantization {config.quantization}, or use ref adapter_off"
        raise error(f" with quantization {difference}, so the KL would not begin at 0: {remedy}")
    if reference.fingerprint == policy.fingerprint or any_version:
        return
    served, begun_with = f"{reference.name} ({reference.fingerprint})", f"{policy.name} ({policy.fingerprint})"
    # The numbers that quantized weights stand for depend on dtype and device: equal configurations are all that shows.
    is_quantized = {reference.quantization, policy.quantization} != {"none"}
    if not (config.allow_other_reference or (is_quantized and has_config)):
        other = f"which is another model than the policy starts from, {begun_with}"
        remedy = f"{restart}, or set allow_other_reference to train with it"
        raise error(f" ({reference.fingerprint}), {other}: {remedy}")
    message = "the reference, %s, has other weights than the policy starts from, %s: the KL will not begin at 0"
    log.warning(message, served, begun_with)


def check_top_k(url: str, most: int, wanted: int) -> None:
    """Raise ServerError for a server that answers with fewer of the likeliest tokens."""
    if most < wanted:
        remedy = f"use distillation_top_k {most} or less" if most else "restart it with the trainer's version"
        raise ServerError(f"{url} answers with {most} of the likeliest tokens, and {wanted} are wanted: {remedy}")


def check_teacher(
    config: TrainerConfig, url: str, *, policy: ModelInfo, teacher: ModelInfo, has_pictures: bool = False
) -> None:
    """Raise ServerError for a teacher to which the policy's token ids mean something else, or are too many. The heads
    may differ in width: larger models of a family often pad theirs."""

    def error(fault: str) -> ServerError:
        return ServerError(f"{url} serves {teacher.name}{fault}")

    if not teacher.text_fingerprint:
        raise error(" and does not tell how it reads texts: restart it with the trainer's version")
    if teacher.tokenizer_fingerprint != policy.tokenizer_fingerprint:
        remedy = "use a teacher of the policy's family"
        raise error(f", whose vocabulary is not that of {policy.name}, so a token id is another word there: {remedy}")
    if teacher.text_fingerprint != policy.text_fingerprint:
        reason = f"whose tokenizer has the vocabulary of {policy.name}, and other special tokens or other rules"
        raise error(f", {reason}: save the policy's tokenizer with the teacher, or use another teacher")
    if has_pictures and teacher.processor_fingerprint != policy.processor_fingerprint:
        raise error(f" and prepares pictures in another way than {policy.name}: use a teacher of its family")
    if config.longest_sequence > teacher.max_length:
        longest = f"max_prompt_length + max_completion_length is {config.longest_sequence}"
        remedy = "restart it with a larger --max_length, or lower one"
        raise error(f" and takes at most {teacher.max_length} tokens a sequence, and {longest}: {remedy}")


class LogprobsClient(TaskClient):
    """The client of servers that score completions, all with the same model."""

    def __init__(self, config: TrainerConfig, urls: list[str], run: str = "", top_k: int = 0):
        """With `top_k` the servers are asked for the likeliest tokens too."""
        super().__init__(config, "logprobs", urls, wanted="log-probs", run=run)
        self.top_k, self.vocab_size = top_k, 1 << 24  # ids of answers are below this
        self._alone_until = 0.0  # time.monotonic() until which groups share no request

    def check_alike(self, servers: dict[str, ServerInfo]) -> ModelInfo:
        """Return the model of all servers. Raises ServerError for differing models."""
        (first_url, first), *others = ((url, server.model) for url, server in servers.items())
        for url, model in others:
            if model.fingerprint != first.fingerprint:
                names = [f"{model.name} ({model.fingerprint})" for model in (first, model)]
                models = f"{first_url} serves {names[0]} but {url} serves {names[1]}"
                raise ServerError(f"{models}: start every server with the same model")
        return first

    def request_groups(
        self, groups: Iterable[tuple[str, list[int], list[list[int]]]]
    ) -> list[Future[list[np.ndarray]]]:
        """Request the log-probs of groups, each (name in messages, prompt, completions); return at once. Small groups
        share a request; after a failed one, no groups do for `ref_deadline` seconds. Each group's future gives float32
        [len(completion)] for each completion, with top_k the rows of LogprobsAnswer.table, or raises ServerError."""
        make = partial(
            LogprobsRequest.of, temperature=self._config.temperature, client=self._client_id, top_k=self.top_k
        )
        asked: list[_Asked] = [
            (make(prompt_ids, completions, request_id=name), Future()) for name, prompt_ids, completions in groups
        ]
        may_share = time.monotonic() >= self._alone_until
        for shared in cut_requests(asked) if may_share else ([request] for request in asked):
            self._threads.submit(self._answer, shared)
        return [future for _, future in asked]

    def _answer(self, asked: list[_Asked]) -> None:
        """Send requests as one, or one after the other if that fails, and give each future its answer or an error. A
        slow server may answer each in time and not all together, and a small queue may have no room for all. So the
        shared request is sent once, and each of the others until `ref_deadline`. The first that fails ends the run."""
        asked = [(request, future) for request, future in asked if future.set_running_or_notify_cancel()]
        try:
            if len(asked) > 1:
                try:
                    return self._send(asked, once=True)
                except (RequestFailure, RequestRefused) as error:
                    self._alone_until = time.monotonic() + self._config.ref_deadline
                    log.info("%d groups are sent one by one: their request failed (%s)", len(asked), error)
            for alone in asked:
                self._send([alone])
        except Exception as error:  # raised to whoever waits for an answer, as by an executor
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)

    def _send(self, asked: list[_Asked], once: bool = False) -> None:
        whole = LogprobsRequest.joined([request for request, _ in asked])
        tokens = int(whole.completion_lengths.sum())
        decode = partial(decode_answer, tokens=tokens, top_k=whole.top_k, vocab_size=self.vocab_size)
        answer = self.balancer.send(encode_request(whole), decode, len(whole.input_ids), whole.request_id, once)
        rows = iter(np.split(answer.table, np.cumsum(whole.completion_lengths)[:-1]))
        for request, future in asked:
            future.set_result([*islice(rows, len(request.completion_lengths))])


class ReferenceClient(LogprobsClient):
    """The client of the reference servers. `balancer` sends them new weights."""

    def __init__(self, config: TrainerConfig, run: str = ""):
        super().__init__(config, config.ref_servers, run)

    def wait_ready(self, any_version: bool = False) -> ModelInfo:
        """Wait until every server is ready and check that all serve the same model; return it. With `any_version` each
        may have another of this run's references: the balancer's `send_weights` or `use_only` names the right one
        afterwards. Raises ServersUnavailable as `wait_for_servers`, ServerError for differing models, or missing
        updates that the run needs."""
        config = self._config
        start = f"'python ref_server.py --model_name_or_path {config.model_name_or_path}' there"
        remedy = f"{start}, or set ref_servers to its address, or beta to 0 to train without"
        servers = self.wait_for_servers("reference", remedy)
        first = servers[config.ref_servers[0]].model if any_version else self.check_alike(servers)
        for url, server in servers.items():
            if config.ref_update_steps and not server.takes_updates:
                remedy = "restart it with --update_folder PATH, or set ref_update_steps to 0"
                raise ServerError(f"{url} takes no new weights: {remedy}")
        self.connection.fingerprint = first.fingerprint
        if any_version:
            self.connection.outdated.update(server.model.fingerprint for server in servers.values())
        return first


class TeacherClient(LogprobsClient):
    """The client of a teacher: a server with a better model, which scores what the policy drew."""

    def __init__(self, config: TrainerConfig, urls: list[str], run: str = ""):
        super().__init__(config, urls, run, top_k=config.teacher_top_k)
        self.urls = urls

    def wait_ready(self) -> ModelInfo:
        """Wait until every server is ready, and return their model. Raises ServersUnavailable as `wait_for_servers`,
        ServerError for differing models, or servers that cannot answer with the likeliest tokens."""
        start = "'python ref_server.py --model TEACHER' there, or name its address in teacher_servers"
        servers = self.wait_for_servers("teacher", start)
        for url, server in servers.items():
            check_top_k(url, server.most_top_k, self.top_k)
        model = self.check_alike(servers)
        self.connection.fingerprint = model.fingerprint
        return model


def cut_requests(asked: Iterable[_Asked]) -> Iterator[list[_Asked]]:
    """Share out groups to requests of up to SHARED_TOKENS; a larger group, or one with pictures, is by itself. Groups
    of equal prompts share no request: a deterministic server would compute them in one pass."""
    shared: list[_Asked] = []
    prompts: set[bytes] = set()
    tokens = 0
    for request, future in asked:
        size = SHARED_TOKENS if request.pictures else len(request.input_ids)
        prompt = request.input_ids[: request.prompt_lengths[0]].tobytes()
        if shared and (tokens + size > SHARED_TOKENS or prompt in prompts):
            yield shared
            shared, prompts, tokens = [], set(), 0
        shared.append((request, future))
        prompts.add(prompt)
        tokens += size
    if shared:
        yield shared


_CHATS_PER_REQUEST = 16  # few enough that a request which fails is cheap to send again


class RewardClient(TaskClient):
    """The client of one reward server: chats go out, scores come back. Tokenizer and template are the server's."""

    def __init__(self, config: ClientConfig, url: str, run: str = ""):
        super().__init__(config, "reward", [url], wanted="scores", run=run)

    def wait_ready(self) -> None:
        """Wait until the server is ready. Raises ServersUnavailable, ServerError as `wait_for_servers`."""
        remedy = "'python ref_server.py --task reward' there, or name its address in reward_funcs"
        (server,) = self.wait_for_servers("reward", remedy).values()
        self.connection.fingerprint = server.model.fingerprint

    async def score(self, conversations: list[list[Message]]) -> list[float]:
        """Return one float32 per conversation. Raises ServerError if the server refuses them, or is too late."""
        futures = []
        for start in range(0, len(conversations), _CHATS_PER_REQUEST):
            chats = conversations[start : start + _CHATS_PER_REQUEST]
            request = RewardRequest(inputs=chats, request_id=f"completions {start} and on", client=self._client_id)
            futures.append(self._threads.submit(self._get_scores, request))
        answers = await asyncio.gather(*map(asyncio.wrap_future, futures))
        return [score for scores in answers for score in scores.tolist()]

    def _get_scores(self, request: RewardRequest) -> np.ndarray:
        body, decode = request.to_json(), partial(RewardAnswer.from_json, inputs=len(request.inputs))
        return self.balancer.send(body, decode, len(body), request.request_id).scores
