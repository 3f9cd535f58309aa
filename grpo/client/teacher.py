"""The client of a teacher: a server with a better model, which scores what the policy drew."""

from grpo.client.reference import LogprobsClient
from grpo.client.server_errors import ServerError
from grpo.config.trainer import TrainerConfig
from grpo.wire.health import ModelInfo


class TeacherClient(LogprobsClient):
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
