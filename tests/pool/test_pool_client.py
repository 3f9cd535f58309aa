"""Whose fault it is when a pool's client gets no answer that it can use: each in one sentence."""

import ssl
import threading
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial

import pytest
import trustme
from conftest import free_port
from pools import RUN, running_pool
from proxy import Proxy
from servers import fake
from stored import PROBE, sha, task_of

from grpo.client.server_errors import FileFailure, RequestFailure, ResultRefused, ServerError, ServersUnavailable
from grpo.pool.client import PoolClient, Retrier
from grpo.pool.protocol import GroupResult, Version

pytestmark = [pytest.mark.plain_start, pytest.mark.slow]


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    (folder / "token").write_text("secret")
    with running_pool(folder, "--token_file", str(folder / "token")) as server:
        yield server


@contextmanager
def answering(status: int, body: bytes):
    """Another program: it answers everything with this."""
    with fake(lambda count: (status, {}, body), lambda: (status, {}, body)) as server:
        yield server.url


def test_a_wrong_token_is_said_to_be_one(pool):
    for token, kind in [(None, "a"), ("guess", "another")]:
        says = f"wants {kind} token: give pool, trainer and workers the same one.*GRPO_REF_TOKEN"
        with pytest.raises(ServerError, match=f"^{pool.url} {says}"):
            PoolClient(pool.url, token=token).run()


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, b"<html>Not Found</html>", "a web page: another program or a proxy answers there"),
        (404, b'{"error": {"code": "not_found", "message": "its --task is logprobs"}}', "its --task is logprobs"),
        (200, b"<html>Welcome</html>", "the body is not JSON"),
        (200, b'{"status": "ok"}', "unknown field"),
    ],
)
def test_another_program_is_said_to_be_no_pool(status, body, reason):
    with answering(status, body) as url, pytest.raises(ServerError) as refusal:
        PoolClient(url).run()
    assert str(refusal.value).startswith(f"{url} is no pool of rollouts (") and reason in str(refusal.value)
    assert str(refusal.value).endswith("): set pool to a server of the task rollouts")


def test_https_with_an_authority_of_ones_own(pool, tmp_path):
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ours.pem")
    with closing(Proxy(pool.port, tls=context)) as front:
        assert PoolClient(front.url, token="secret", ref_ca_file=str(tmp_path / "ours.pem")).status()
        with pytest.raises(ServerError, match=r"does not verify \(.*set ref_ca_file to the PEM"):
            PoolClient(front.url, token="secret").status()


def test_damaged_answers_and_proxies_without_a_server_are_asked_again():
    with answering(200, b"{") as url:
        client = PoolClient(url)
        for ask in (client.versions, partial(client.take, [], 0), partial(client.results, "a", [], []), client.status):
            with pytest.raises(RequestFailure, match="sent a damaged answer"):
                ask()
    with answering(502, b"<html>Bad Gateway</html>") as url, pytest.raises(RequestFailure, match="said 502: a web"):
        PoolClient(url).run()
    with pytest.raises(RequestFailure, match=r"cannot be reached \(Connection refused\)"):
        PoolClient(url).run()


def test_of_several_pools_another_is_asked_when_one_does_not_answer(pool):
    urls = [f"http://127.0.0.1:{free_port()}", pool.url]
    clients = [PoolClient(",".join(urls), token="secret") for _ in range(20)]
    assert {client.url for client in clients} == {*urls}
    for client in clients:
        if client.url != pool.url:
            with pytest.raises(RequestFailure, match="cannot be reached"):
                client.status()
        assert client.status()["workers"] == [] and client.url == pool.url


def test_a_pool_without_its_database_is_left_for_another(pool):
    """Also where a proxy before it names an hour."""
    with fake(health=lambda: (503, {"Retry-After": "3600"}, b"")) as away:
        client = PoolClient(f"{away.url},{pool.url}", token="secret")
        client.url = away.url
        with pytest.raises(RequestFailure, match="said 503") as failure:
            client.status()
        assert failure.value.retry_after == 60 and client.status()["workers"] == []


def test_of_several_pools_that_fail_each_is_named_with_its_own_failure(monkeypatch, caplog):
    monkeypatch.setattr("grpo.pool.client.seconds_to_next_try", lambda *_: 0.01)
    with fake(health=lambda: (503, {}, b"")) as away:
        client = PoolClient(f"http://127.0.0.1:{free_port()},{away.url}")
        with pytest.raises(ServersUnavailable) as refusal:
            Retrier(client, 0.3, threading.Event())(client.run)
        for line in (str(refusal.value), *caplog.messages):
            assert (away.url in line) == ("said 503" in line) != ("cannot be reached" in line)


def test_completions_that_no_pool_would_take_are_refused_before_they_are_sent(monkeypatch):
    monkeypatch.setattr("grpo.wire.refusals.BODY_BYTES", 1 << 20)
    drawn = GroupResult(
        group=7, attempt=0, completions=[[2] * 200_000], logprobs=[[-0.5] * 200_000], versions=[[0] * 200_000]
    )
    says = "completions of group 7 have 2 MiB, and a pool takes 1 at a time: give the run fewer num_generations"
    with pytest.raises(ServerError, match=says):
        PoolClient("http://nobody").results("a worker", [drawn], [])


def test_a_pool_that_answers_some_and_not_others_is_said_to_be_away_once(monkeypatch, caplog):
    """As with a full disk: it renews leases, and takes no completions."""
    monkeypatch.setattr("grpo.pool.client.seconds_to_next_try", lambda *_: 0.01)
    caplog.set_level("INFO")
    patience, tries = Retrier(PoolClient("http://pool"), 20, threading.Event()), []

    def send_results():
        tries.append(1)
        if len(tries) < 20:
            raise RequestFailure("said 503: its disk may be full")

    sender = threading.Thread(target=patience, args=[send_results])
    sender.start()
    while len(tries) < 20:
        patience(lambda: None)
    sender.join()
    away = "http://pool said 503: its disk may be full; asking again for 20 s"
    assert caplog.messages == [away, "http://pool answers again"]


def test_a_pool_that_refuses_after_a_while_is_not_away_any_more(monkeypatch, caplog):
    monkeypatch.setattr("grpo.pool.client.seconds_to_next_try", lambda *_: 0.0)
    caplog.set_level("INFO")
    patience = Retrier(PoolClient("http://pool"), 20, threading.Event())
    away = RequestFailure("is away")
    for last in (ResultRefused("these are no completions"), None):
        answers = iter([away, away, last])

        def send(answers=answers):
            if answer := next(answers):
                raise answer

        with suppress(ResultRefused):
            patience(send)
    line = "http://pool is away; asking again for 20 s"
    assert caplog.messages == [line, line, "http://pool answers again"]


def test_what_the_pool_refuses_is_sorted_by_what_helps(pool, tmp_path):
    client = PoolClient(pool.url, token="secret")
    assert client.run() is None
    client.put_run(RUN)
    client.put_run(RUN)
    assert client.run() == RUN
    with pytest.raises(ServerError, match="refused a request with 409: the pool is of run"):
        client.put_run(replace(RUN, run="f" * 16))
    client.put_tasks([task_of(0)])
    with pytest.raises(ServerError, match="refused a request with 409: group 0 has another prompt"):
        client.put_tasks([task_of(0, [6])])
    data = b"weights"
    version = Version(version=0, sha256=sha(data), size=len(data), whole=True, base=None, delta=None, probe=PROBE)
    with pytest.raises(RequestFailure, match="said 409: "):  # its file can still be sent
        client.put_version(version)
    with pytest.raises(RequestFailure, match="said 409: what came is not what was announced"):
        client.send_file(b"0123456789", "b" * 64)
    client.send_file(data, sha(data))
    client.put_version(version)
    weights = [(0, sha(data))]
    drawn = GroupResult(group=0, attempt=0, completions=[[2]] * 4, logprobs=[[-0.5]] * 4, versions=[[0]] * 4)
    with pytest.raises(ResultRefused, match="refused a request with 422: group 0: 1 completions"):
        client.results("a worker", [replace(drawn, completions=[[2]], logprobs=[[-0.5]], versions=[[0]])], weights)
    assert client.results("a worker", [drawn, drawn], weights) == ["accepted", "already there"]
    with pytest.raises(FileFailure, match="said 404: "):
        client.fetch_file("0" * 64, tmp_path / "file")
    assert client.take([(0, 0)], 0) == [drawn] and client.take([(1, 0)], 0) == []
