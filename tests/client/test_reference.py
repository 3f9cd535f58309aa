"""The client of the reference servers, against real servers that are late, killed, restarted, wrong, or no servers."""

import itertools
import re
import socket
import ssl
import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import replace

import numpy as np
import pytest
import requests
import trustme
from conftest import free_port, running_server
from proxy import Plan, proxy
from rounding import assert_rounded
from servers import COMPLETIONS, HEALTH, MODEL, answer, fake, open_client, request, wait_until

from grpo.client import balancer
from grpo.client import reference as reference_module
from grpo.client.balancer import IN_FLIGHT
from grpo.client.reference import ReferenceClient, check_reference, cut_requests, make_client_name
from grpo.client.server_errors import ServerError, ServersUnavailable
from grpo.config.command_line import parse_arguments
from grpo.config.trainer import TrainerConfig
from grpo.wire.health import ModelInfo, ServerInfo
from grpo.wire.logprobs import LogprobsRequest
from grpo.wire.picture_files import PicturedPrompt
from grpo.wire.refusals import check_name

PATIENT = {"ref_startup_timeout": 20, "ref_deadline": 30, "ref_request_timeout": 20}


def test_small_groups_share_a_request_and_each_gets_its_own(server):
    def answered() -> float:
        text = requests.get(server.url + "/metrics", timeout=5).text
        found = re.search(r'grpo_ref_requests_total\{path="/v1/logprobs",status="200"\} (\S+)', text)
        return float(found[1]) if found else 0.0

    sizes = [10, 20, 20, 450, 30, 0]  # of the completions; the fourth group fills a request
    groups = [(f"group {at}", [5, 6, 7 + at], [[8] * size, [9], [10] * size] * 5) for at, size in enumerate(sizes)]
    groups.append(("group 6", [5, 6, 7 + 4], [[11, 12]]))  # a prompt that is there
    with open_client(server.url, **PATIENT) as client:
        before = answered()
        rows = [future.result() for future in client.request_groups(groups)]
        wait_until(lambda: answered() == before + 4, 5)  # 0 to 2; 3; 4 and 5; 6
        for (name, prompt, completions), of_group in zip(groups, rows, strict=True):
            alone = request(client, prompt, completions, name).result()
            assert [(len(row), row.dtype) for row in of_group] == [(len(ids), np.float32) for ids in completions]
            assert_rounded(np.concatenate(of_group), np.concatenate(alone))


def test_groups_with_pictures_are_sent_alone():
    prompts = [[1, 2], PicturedPrompt([3, 4], (b"a picture",)), [5], [6]]
    asked = [(LogprobsRequest.of(prompt, [[7]], 1.0), Future()) for prompt in prompts]
    assert [*cut_requests(asked)] == [asked[:1], asked[1:2], asked[2:]]


def test_a_group_that_is_cancelled_is_left_out_and_the_others_are_answered():
    held, go = threading.Semaphore(0), threading.Event()

    def post(count):
        held.release()
        go.wait(30)
        return answer()

    with fake(post) as busy, open_client(busy.url, ref_request_timeout=20, ref_deadline=30) as client:
        for _ in range(IN_FLIGHT):
            request(client)
            assert held.acquire(timeout=20)
        first, second = client.request_groups([("a", [5], COMPLETIONS), ("b", [6], COMPLETIONS)])
        assert second.cancel()
        go.set()
        assert [row.tolist() for row in first.result(30)] == [[-1, -2, -3], [], [-4]]


@pytest.mark.parametrize("bad", [(413, {}, b"{}"), (200, {}, answer()[2][:-1]), None])
def test_groups_whose_shared_request_fails_are_sent_alone(bad):
    """It is refused, its answer is damaged, or there is none in time."""
    groups = [(f"group {at}", [5 + at], COMPLETIONS) for at in range(3)]
    given_up = threading.Event()

    def post(count):
        if count == 0 and bad is None:
            given_up.wait(30)
        given_up.set()
        return bad if count == 0 and bad is not None else answer()

    patience = 2 if bad is None else 20
    with fake(post) as server, open_client(server.url, ref_deadline=60, ref_request_timeout=patience) as client:
        for requests_in_all in (4, 7):  # the second time none is tried together
            for future in client.request_groups(groups):
                assert [row.tolist() for row in future.result(20)] == [[-1, -2, -3], [], [-4]]
            assert server.requests == requests_in_all


@pytest.mark.slow
def test_a_slow_server_has_no_more_in_work_than_it_answers_in_time():
    """A request that is given up is computed again."""
    with fake(working(0.4)) as server, open_client(server.url, ref_request_timeout=2, ref_deadline=60) as client:
        request(client).result(20)  # from now on its speed is known
        ask(client, 10)
        assert server.requests == 11


def test_groups_whose_server_is_gone_are_given_up_together_after_one_deadline():
    groups = [(f"group {at}", [5 + at], COMPLETIONS) for at in range(20)]
    began = time.monotonic()
    with open_client(f"http://127.0.0.1:{free_port()}", ref_deadline=0.5) as client:
        for future in client.request_groups(groups):
            with pytest.raises(ServersUnavailable, match="no log-probs for group 0 .*ref_request_timeout how long"):
                future.result(10)
    assert 0.5 <= time.monotonic() - began < 5  # by itself each waits for 0.5 s


def test_a_request_to_an_older_reference_does_not_keep_its_server_from_the_others():
    """The first request after a failure is the server's trial, until which it gets no other."""
    held, go = threading.Event(), threading.Event()

    def post(count):
        if count == 0:
            return 503, {}, b"{}"
        if count == 1:
            held.set()
            go.wait(30)
            return answer()
        return answer("new")

    with fake(post) as server, open_client(server.url, ref_deadline=60, ref_request_timeout=30) as client:
        client.wait_ready()
        future = request(client)
        assert held.wait(20)
        client.balancer.use_only("new")
        go.set()
        assert [row.tolist() for row in future.result(20)] == [[-1, -2, -3], [], [-4]]


def test_a_run_that_is_asked_to_stop_waits_little_for_servers_that_are_away_and_long_for_busy_ones(monkeypatch):
    monkeypatch.setattr(balancer, "AFTER_STOP", 0.5)

    def post(count):
        time.sleep(1.5)
        return answer()

    with fake(post) as busy, open_client(busy.url, ref_deadline=60, ref_request_timeout=20) as client:
        client.balancer.stopping.set()
        for future in [request(client) for _ in range(IN_FLIGHT + 1)]:
            assert len(future.result(20)) == len(COMPLETIONS)
    with open_client(f"http://127.0.0.1:{free_port()}", ref_deadline=60) as client:
        future = request(client)
        with pytest.raises(TimeoutError):
            future.result(1)
        client.balancer.stopping.set()
        with pytest.raises(ServersUnavailable, match=r"after \d s"):
            future.result(20)


@pytest.mark.slow
def test_a_server_that_loads_is_waited_for_and_one_that_is_gone_is_not(monkeypatch):
    began, body = time.monotonic(), ServerInfo(status="loading", model=ModelInfo(name="org/large")).to_json()

    def health():
        loading = time.monotonic() - began < 2.5
        return (503, {"Retry-After": "2"}, body) if loading else (200, {}, HEALTH.to_json())

    with fake(health=health) as server, open_client(server.url, ref_startup_timeout=1) as client:
        assert client.wait_ready() == MODEL
    assert time.monotonic() - began >= 2.5
    with fake(health=lambda: (503, {}, body)) as server, open_client(server.url, ref_startup_timeout=1) as client:
        threading.Timer(2.0, lambda: (server.shutdown(), server.server_close())).start()
        with pytest.raises(
            ServersUnavailable, match=rf"no reference server at {server.url} \(it cannot be .* after 1 s"
        ):
            client.wait_ready()
    monkeypatch.setattr(reference_module, "LONGEST_LOADING", 1.5)
    with (
        fake(health=lambda: (503, {}, body)) as server,
        open_client(server.url, ref_startup_timeout=1) as client,
        pytest.raises(ServersUnavailable, match=f"{server.url} has been loading its model for [0-9]+ s: see its log"),
    ):
        client.wait_ready()


def test_servers_of_different_models_are_refused():
    other = replace(HEALTH, model=replace(MODEL, fingerprint="x"))
    with (
        fake() as one,
        fake(health=lambda: (200, {}, other.to_json())) as another,
        open_client(one.url, another.url) as client,
        pytest.raises(ServerError, match="start every server with the same model"),
    ):
        client.wait_ready()


def test_what_the_server_refuses_is_not_sent_again(server):
    refused = pytest.raises(ServerError, match="422: sequence 0 has 601 tokens")
    with open_client(server.url, ref_deadline=60) as client, refused:
        request(client, [5], [[6] * 600], "g").result(timeout=10)
    assert client.balancer.servers[0].speed == 0  # which a quick refusal would make the fastest


@pytest.mark.slow
def test_tokens_must_be_the_same(model_folder, tmp_path):
    for token in ("right", "wrong"):
        (tmp_path / token).write_text(token)
    with running_server(model_folder, tmp_path, environment={"GRPO_REF_TOKEN": "right"}) as server:
        with open_client(server.url, token_file=str(tmp_path / "right"), **PATIENT) as client:
            client.wait_ready()
            assert len(request(client).result()) == 3
        wants = pytest.raises(ServerError, match="wants a token: .*GRPO_REF_TOKEN")
        with open_client(server.url, **PATIENT) as client, wants:
            client.wait_ready()
        with open_client(server.url, token_file=str(tmp_path / "wrong"), **PATIENT) as client:
            with pytest.raises(ServerError, match="wants another token"):
                client.wait_ready()
            with pytest.raises(ServerError, match="401"):
                request(client).result()


GOOD = answer()[2]


def ask(client, count) -> None:
    """Send so many requests at once; each must get the right answer."""
    for future in [request(client, name=f"g{number}") for number in range(count)]:
        assert [row.tolist() for row in future.result(timeout=60)] == [[-1, -2, -3], [], [-4]]


@pytest.mark.timed
@pytest.mark.parametrize(
    "bad",
    [(503, {"Retry-After": "1"}, b"{}"), (502, {}, b"<html>"), (408, {}, b""), (200, {}, GOOD[:-1]), (200, {}, b"")],
)
def test_busy_servers_and_damaged_answers_are_asked_again(bad):
    with (
        fake(lambda count: bad if count < 2 else answer()) as server,
        open_client(server.url, ref_deadline=30) as client,
    ):
        started = time.monotonic()
        ask(client, 1)
        assert server.requests == 3
        named_a_time = bad[0] == 503
        assert (server.health_checks == 0) == named_a_time == (time.monotonic() - started >= 2)


def working(seconds, may=None):
    """Return a `post` that answers one request after the other, each after `seconds`, while the event `may` is set."""
    turn = threading.Lock()

    def post(count):
        if may is not None:
            may.wait(10)
        with turn:
            time.sleep(seconds)
        return answer()

    return post


@pytest.mark.timed
@pytest.mark.slow
def test_work_goes_by_speed():
    with (
        fake(working(0.01)) as fast,
        fake(working(0.05)) as slow,
        open_client(slow.url, fast.url, ref_deadline=60) as client,
    ):
        client.wait_ready()
        ask(client, 180)
        assert fast.requests + slow.requests == 180
        assert 12 <= slow.requests <= 60  # 30 if it were exact, 90 if turns were taken
        before = slow.requests
        for _ in range(30):
            ask(client, 1)
        assert slow.requests - before <= 3  # alone, a request is soonest answered by the fast one


def test_a_slower_server_takes_over_from_a_silent_one_before_its_timeout():
    may = threading.Event()
    may.set()
    with (
        fake(working(0.001, may)) as stalls,
        fake(working(0.05)) as slow,
        open_client(stalls.url, slow.url, ref_deadline=60, ref_request_timeout=20) as client,
    ):
        client.wait_ready()
        ask(client, 60)
        may.clear()
        futures = [request(client, name=f"g{number}") for number in range(20)]
        wait_until(lambda: sum(future.done() for future in futures) >= 12, 6)
        may.set()
        assert all(len(future.result(timeout=20)) == 3 for future in futures)


def test_a_busy_servers_work_goes_to_the_other_at_once():
    busy = 503, {"Retry-After": "30"}, b"{}"
    settings = {"ref_deadline": 20, "ref_request_timeout": 20}
    with fake(lambda count: busy) as full, fake() as free, open_client(full.url, free.url, **settings) as client:
        client.wait_ready()
        ask(client, 40)
        assert 1 <= full.requests <= 8 and free.requests == 40 and full.health_checks == 1


def test_a_server_that_comes_back_has_work_again_and_both_are_said_once(caplog):
    caplog.set_level("INFO")
    nobody, settings = f"http://127.0.0.1:{free_port()}", {"ref_deadline": 20, "ref_request_timeout": 20}
    with fake() as stays, open_client(stays.url, nobody, **settings) as client:
        comes = client.balancer.servers[1].url
        ask(client, 20)
        wait_until(lambda: f"{comes} cannot be reached" in caplog.text)
        with fake(port=int(comes.rsplit(":")[-1])) as back:
            wait_until(lambda: ask(client, 4) or back.requests >= 10)
        ask(client, 20)
        wait_until(lambda: caplog.text.count("out of rotation") == 2)
    levels = [record.levelname for record in caplog.records if comes in record.getMessage()]
    assert levels == ["WARNING", "INFO", "WARNING"]


@pytest.mark.slow
def test_a_server_that_is_ready_but_hangs_gets_one_request_at_a_time():
    """Its /health answers, its worker hangs: each round costs one request's timeout, not eight."""
    hanging = threading.Event()

    def post(count):
        if hanging.is_set():
            time.sleep(1.5)
        return answer()

    with fake(post) as hangs, open_client(hangs.url, ref_deadline=30, ref_request_timeout=0.5) as client:
        client.wait_ready()
        hanging.set()
        futures = [request(client, name=f"g{number}") for number in range(12)]
        wait_until(lambda: hangs.requests >= 11)
        assert hangs.requests - 8 <= hangs.health_checks - 1
        hanging.clear()
        assert all(len(future.result(timeout=20)) == 3 for future in futures)


@pytest.mark.timed
def test_a_server_that_changes_its_model_leaves_the_rotation_and_when_all_do_the_run_ends(caplog):
    models = ["f", "f"]

    def serving(place):
        def health():
            return 200, {}, ServerInfo(status="ready", model=replace(MODEL, fingerprint=models[place])).to_json()

        return fake(lambda count: answer(models[place]), health)

    with serving(0) as first, serving(1) as second, open_client(first.url, second.url, ref_deadline=60) as client:
        client.wait_ready()
        ask(client, 10)
        models[0] = "other"
        for _ in range(5):
            ask(client, 10)
        wait_until(lambda: first.health_checks >= 2)
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 1 and f"{first.url} now serves another model (other, and this run's is f)" in errors[0]

        models[0], before = "f", first.requests
        wait_until(lambda: ask(client, 4) or first.requests > before + 1)

        models[:] = ["other", "other"]
        started = time.monotonic()
        with pytest.raises(ServerError, match="every reference server has changed") as changed:
            ask(client, 10)
        assert first.url in str(changed.value) and second.url in str(changed.value)
        assert time.monotonic() - started < 10


@pytest.mark.slow
def test_the_deadlines_sentence_names_each_server_and_what_it_last_said():
    dead, body = f"http://127.0.0.1:{free_port()}", b'{"error": {"code": "busy", "message": "full up"}}'
    settings = {"ref_deadline": 3, "ref_request_timeout": 1}
    with (
        fake(lambda count: (503, {"Retry-After": "9"}, body)) as full,
        proxy(1, lambda: Plan(black_hole=True)) as hole,
        open_client(dead, full.url, hole.url, **settings) as client,
    ):
        futures = [request(client, name=f"g{number}") for number in range(10)]
        with pytest.raises(ServersUnavailable) as gone:
            futures[0].result(timeout=10)
    for part in (
        "no log-probs for g0 after 3 s",
        f"{dead} (it cannot be reached (Connection refused))",
        f"{full.url} (it said 503: full up)",
        f"{hole.url} (it did not answer in time)",
        "ref_deadline",
    ):
        assert part in str(gone.value)


def test_the_start_waits_for_all_together_and_names_those_that_are_missing():
    missing = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]  # nobody listens there, and no two are the same
    with fake() as there, open_client(missing[0], there.url, *missing[1:]) as client:
        with pytest.raises(ServersUnavailable) as gone:
            client.wait_ready()
        for part in (*missing, "after 1 s", "Connection refused", "python ref_server.py", "beta to 0"):
            assert part in str(gone.value)
        assert there.url not in str(gone.value)


def test_what_still_waits_when_the_client_closes_is_given_up_and_its_threads_end():
    nobody = f"http://127.0.0.1:{free_port()}", "http://192.0.2.1:9"  # one refuses, one is silent
    with open_client(*nobody, ref_deadline=600) as client:
        futures = client.request_groups([(f"a{number}", [5 + number], COMPLETIONS) for number in range(3)])
        futures += [request(client, name=f"g{number}") for number in range(12)]
        time.sleep(0.5)
    for future in futures:
        with pytest.raises((ServerError, CancelledError)):
            future.result(timeout=5)
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith(("logprobs-client", "recovery"))], 8)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("what", ["request_bytes", "answer_bytes"])
@pytest.mark.parametrize("count", [0, 1, 40, 300])
def test_what_is_cut_on_its_way_is_asked_for_again_and_right(server, count, what, reset):
    """The first connection is cut, within the head or the body; those after it pass."""
    with open_client(server.url, **PATIENT) as client:
        expected = np.concatenate(request(client).result())
    plans = itertools.chain([Plan(**{what: count}, reset=reset)], itertools.repeat(Plan()))
    with proxy(server.port, lambda: next(plans)) as between, open_client(between.url, ref_deadline=30) as client:
        assert_rounded(np.concatenate(request(client).result()), expected)
        assert between.happened.total() == 1


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


def tls(authority, name) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


@pytest.mark.timed
def test_https_with_an_authority_of_ones_own(server, authority, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours, others = tmp_path / "ours.pem", tmp_path / "others.pem"
    authority.cert_pem.write_to_path(ours)
    trustme.CA().cert_pem.write_to_path(others)
    with open_client(server.url) as client:
        expected = np.concatenate(request(client).result())
    with proxy(server.port, tls=tls(authority, "127.0.0.1")) as front:
        with open_client(front.url, ref_ca_file=ours.name) as client:
            monkeypatch.chdir("/")  # as a reward function may
            assert client.wait_ready().vocab_size > 0
            rows = [request(client, name=f"g{number}").result() for number in range(3)]
        for row in rows:
            assert_rounded(np.concatenate(row), expected)
        for settings in ({}, {"ref_ca_file": others}):
            started = time.monotonic()
            with (
                open_client(front.url, ref_startup_timeout=300, **settings) as client,
                pytest.raises(ServerError, match=r"does not verify \(.*set ref_ca_file to the PEM") as refused,
            ):
                client.wait_ready()
            assert front.url in str(refused.value) and time.monotonic() - started < 10
        with (
            open_client(front.url.replace("https:", "http:")) as client,
            pytest.raises(ServersUnavailable, match="cannot be reach"),
        ):
            client.wait_ready()
    with (
        proxy(server.port, tls=tls(authority, "elsewhere.example")) as front,
        open_client(front.url, ref_ca_file=ours) as client,
        pytest.raises(ServerError, match=r"not valid for '127.0.0.1'.*write the host as the certificate does"),
    ):
        client.wait_ready()


def test_an_authoritys_file_without_a_certificate_is_refused(tmp_path):
    (tmp_path / "no.pem").write_text("nothing")
    with pytest.raises(ServerError, match=r"no\.pem'?.*no certificate can be read.*name a PEM file"):
        ReferenceClient(TrainerConfig(ref_ca_file=str(tmp_path / "no.pem")))


@pytest.mark.slow
def test_something_else_on_that_port_is_not_a_reference():
    def page(*_):
        return 200, {}, b"<html>hello</html>"

    with fake(page, page) as server, open_client(server.url) as client:
        with pytest.raises(ServerError, match="is something else"):
            client.wait_ready()
        with pytest.raises(ServersUnavailable, match="it is something else"):
            request(client).result()


PICTURED = replace(MODEL, processor_fingerprint="p")
OTHER = replace(MODEL, name="tuned", fingerprint="x", config_fingerprint="c")
PREPARED = replace(PICTURED, fingerprint="x", processor_fingerprint="q")
ANY = {"allow_other_reference": True}
OLDER = ServerInfo.from_json(b'{"version": 1, "status": "ready", "model": "m", "model_fingerprint": "f"}').model
PREPARES = "m and prepares pictures in another way .* min_pixels unset and max_pixels 4096, and the same"
WRONG = [
    (MODEL, replace(MODEL, tokenizer_fingerprint="other"), {}, "whose vocabulary of 100 is not that of m"),
    (MODEL, replace(MODEL, vocab_size=101), ANY, "whose vocabulary of 101 is not that of m, 100: restart it with"),
    (MODEL, replace(MODEL, max_length=1023), ANY, "at most 1023 tokens a sequence.* is 1024"),
    (MODEL, OTHER, {}, r"tuned \(x\), which is another model than .* m \(f\): restart .* or set allow_other_reference"),
    (MODEL, replace(OTHER, quantization="8bit"), {}, "another model"),
    (PICTURED, OLDER, ANY, "m without pictures, and prompts of this run have some: restart it with"),
    (PICTURED, PREPARED, ANY, PREPARES),
]


@pytest.mark.parametrize("policy, reference, settings, fault", WRONG)
def test_a_reference_that_does_not_fit_is_refused(policy, reference, settings, fault):
    config = parse_arguments(TrainerConfig, "", ["--max_pixels", "4096"])
    check_reference(config, policy, policy, has_pictures=policy is PICTURED)
    with pytest.raises(ServerError, match=f"^http://127.0.0.1:59875 serves .*{fault}"):
        check_reference(replace(config, **settings), policy, reference, has_pictures=policy is PICTURED)


def test_in_a_run_of_text_pictures_do_not_matter_where_any_reference_is_wanted():
    with pytest.raises(ServerError, match="in another way"):
        check_reference(TrainerConfig(), PICTURED, PREPARED)
    check_reference(TrainerConfig(**ANY), PICTURED, PREPARED)
    check_reference(TrainerConfig(), PICTURED, MODEL)


def test_another_model_is_taken_with_a_warning_where_it_is_wanted(caplog):
    check_reference(TrainerConfig(), MODEL, OTHER, any_version=True)  # of a run that goes on
    assert not caplog.messages
    check_reference(TrainerConfig(**ANY), MODEL, OTHER)
    # Of the same configuration, so it may be the same model in fewer bits.
    check_reference(TrainerConfig(), MODEL, replace(MODEL, fingerprint="x", quantization="8bit"))
    assert len(caplog.messages) == 2 and all("the KL will not begin at 0" in line for line in caplog.messages)


def test_the_name_of_a_client_can_be_read_and_is_no_other_clients(monkeypatch):
    monkeypatch.setenv("RANK", "12345")
    monkeypatch.setenv("WORLD_SIZE", "99999")
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 64)
    names = {make_client_name("r" * 200) for _ in range(100)}
    assert len(names) == 100
    for name in names:
        check_name("client", name)
        assert re.fullmatch(r"r{48}, rank 12345 of 99999, h{32} #[0-9a-f]{8}", name)
    assert make_client_name("").startswith("rank 12345 of 99999, h")
    assert make_client_name("läuft\udcff").startswith("läuft?, rank")  # a folder's name may be no text
