"""The numbers that the server shows of itself, over HTTP from a real one, and the arithmetic behind them."""

import json
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import requests
import torch
from conftest import REPOSITORY, running_server
from faulty_server import code_for, summarise_each_second
from prometheus_client.parser import text_string_to_metric_families
from servers import status, wait_until

from grpo.model.load import cards_of, device_memory, device_use
from grpo.server.monitor import Monitor, Pass, quantiles
from grpo.wire.logprobs import LogprobsRequest, encode_request
from grpo.wire.refusals import ProtocolError


def ask(server, prompt, completions, client=""):
    body = encode_request(LogprobsRequest.of(prompt, completions, 1.0, client=client))
    return requests.post(server.url + "/v1/logprobs", data=body, timeout=60)


def samples(server) -> dict[str, float]:
    """Every sample of /metrics, by `name{label,values}`."""
    answer = requests.get(server.url + "/metrics", timeout=5)
    assert answer.status_code == 200 and answer.headers["Content-Type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


@pytest.fixture(scope="module")
def watched(model_folder, tmp_path_factory):
    """A server of which this module knows every request."""
    options = ["--log_level", "debug", "--max_batch_tokens", "100"]
    with running_server(
        model_folder, tmp_path_factory.mktemp("watched"), *options, code=code_for(summarise_each_second)
    ) as server:
        yield server


def test_metrics_count_what_was_asked(watched):
    before = samples(watched)
    for _ in range(3):
        assert ask(watched, [5] * 11, [[6] * 10, [7] * 5]).status_code == 200
    assert ask(watched, [5], [[10**6]]).status_code == 400
    requests.get(watched.url + "/secret", timeout=5)
    after = samples(watched)

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown("grpo_ref_requests_total{/v1/logprobs,200}") == 3
    assert grown("grpo_ref_requests_total{/v1/logprobs,400}") == 1
    assert grown("grpo_ref_requests_total{other,404}") == 1
    # 20 and 15 tokens without the last of each, padded to 20; the prompt of 11 is fed once.
    assert grown("grpo_ref_tokens_total") == 3 * 35
    assert grown("grpo_ref_tokens_saved_total{packing}") == 3 * 5
    assert grown("grpo_ref_tokens_saved_total{sharing}") == 3 * 11
    assert grown("grpo_ref_batch_fill_count") == 3 and grown("grpo_ref_batch_fill_sum") == pytest.approx(3 * 0.24)
    assert grown("grpo_ref_request_seconds_count") == 3
    assert 0 < grown("grpo_ref_forward_seconds_total") <= grown("grpo_ref_request_seconds_sum")
    assert after["grpo_ref_queue_tokens"] == after["grpo_ref_queue_requests"] == after["grpo_ref_clients"] == 0
    assert after["process_resident_memory_bytes"] > 50e6


def test_every_metric_of_the_grafana_dashboard_is_one_of_the_servers(watched):
    assert ask(watched, [5], [[6] * 10]).status_code == 200
    exported = {re.sub(r"{.*", "", name) for name in samples(watched)}
    board = (REPOSITORY / "examples/grafana.json").read_text()
    json.loads(board)
    used = {*re.findall(r"\b(?:grpo_ref|process)_\w+", board)}
    assert len(used) > 10 and used <= exported, used - exported
    page = (REPOSITORY / "docs/reference_server.md").read_text()
    assert {name for name in used if re.sub("_(bucket|sum|count)$", "", name) not in page} == set()


def test_status_shows_clients_and_errors(watched):
    assert ask(watched, [5], [[6] * 10], client="rank <b>0</b>\n").status_code == 200
    assert ask(watched, [5], [[10**6]], client="bad").status_code == 400
    shown = requests.get(watched.url + "/status", timeout=5).json()
    assert shown["health"]["status"] == "ready" and shown["max_batch_tokens"] == 100
    client = shown["clients"][0]
    assert (client["name"], client["address"], client["tokens"]) == ("rank <b>0</b>\n", "127.0.0.1", 11)
    assert client["waiting"] == 0 and 0 <= client["last_seen"] < 10
    error = shown["errors"][0]
    assert (error["status"], error["code"]) == (400, "malformed") and "vocabulary" in error["message"]
    assert shown["latency"]["requests"] >= 1 and 0 < shown["latency"]["p50"] <= shown["latency"]["p99"]


@pytest.mark.slow
def test_the_log_has_a_line_a_request_and_a_summary_each_while(watched):
    assert ask(watched, [5], [[6] * 6], client="evil\nname").status_code == 200
    line = r"POST /v1/logprobs 200 7 tokens [\d.]+ ms 127\.0\.0\.1 'evil\\nname'$"
    assert re.search(line, watched.log.read_text(), re.MULTILINE)
    summary = r"last \d+ s: answers .*[1-9] x 200.*, p50 \d+ ms, p99 \d+ ms; \d+ tokens/s; 0 tokens of 0 clients .*MiB$"
    wait_until(lambda: re.search(summary, watched.log.read_text(), re.MULTILINE))

    curves = status(watched)["history"]
    assert len(curves["busy"]) == 120 and None not in (curves["queue_tokens"][-1], curves["busy"][-1])


def test_the_page_is_one_file_under_a_strict_policy_and_at_info_requests_are_not_logged(server):
    page = requests.get(server.url + "/", timeout=5)
    assert page.status_code == 200 and page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page.text)
    ask(server, [5], [[6]])
    assert "ready" in server.log.read_text() and "POST" not in server.log.read_text()


@pytest.mark.parametrize(
    "values, expected",
    [([], (None, None)), ([3.0], (3.0, 3.0)), ([4.0, 1.0, 3.0, 2.0], (2.0, 4.0)), (range(1, 101), (50, 99))],
)
def test_quantiles_are_values_that_occurred(values, expected):
    assert quantiles(values) == expected


def test_the_memory_of_the_models_cards_is_shown_and_no_other(monkeypatch):
    """There is no card here: torch's answers for eight of 24 GB, of which the second holds the model."""
    card = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: SimpleNamespace(total_memory=24 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda card: 10**9 * (1 + torch.device(card).index))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda card: 10**8 * (1 + torch.device(card).index))
    model = SimpleNamespace(parameters=lambda: [torch.zeros(1), SimpleNamespace(device=card)])
    assert cards_of(model) == [card]
    monitor = Monitor()
    monitor.device_memory = partial(device_memory, cards_of(model))
    shown = monitor.status({})["memory"]
    assert [shown[name] for name in ("device", "device_total", "device_peak")] == [2 * 10**9, 24 * 10**9, 2 * 10**8]
    metrics = monitor.to_prometheus({}).decode()
    assert "grpo_ref_device_memory_bytes 2e+09" in metrics and "grpo_ref_device_memory_peak_bytes 2e+08" in metrics


def test_the_use_of_the_models_cards_is_known_where_nvidias_library_can_be_asked(monkeypatch):
    """There is no card here: torch's answers for two, then for a part of a card, which the library does not know."""
    cards, refusal = [torch.device("cuda", 0), torch.device("cuda", 1)], type("NVMLError", (Exception,), {})
    monkeypatch.setattr(torch.cuda, "utilization", lambda card: 30 + 40 * card.index)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert device_use(cards) is None
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=refusal))
    assert device_use(cards) == 0.5

    def refuse(card):
        raise refusal("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    assert device_use(cards) is None


def test_a_point_of_the_curves_is_the_work_since_the_last_one():
    monitor = Monitor()
    monitor.sample({"one": (70, 2), "two": (5, 1)})
    for seconds in (1.5, 3.0):
        monitor.scored(Pass(tokens=50, padded=150, fed=200, budget=400, seconds=seconds))
    monitor.sample({"one": (70, 2), "two": (5, 1)})
    monitor.sample({})  # nothing more was done
    curves = monitor.status({})["history"]
    assert curves["seconds"] == 5 and curves["tokens_per_second"] == [None] * 117 + [0, 20, 0]
    assert curves["busy"][-3:] == pytest.approx([0, 0.9, 0])
    assert curves["batch_fill"][-3:] == [None, 0.5, None]
    assert curves["queue_tokens"][-2:] == [75, 0] and curves["memory"][-1] > 50e6
    assert curves["device_use"] == [None] * 120  # unknown, and not zero
    for _ in range(200):
        monitor.sample({"one": (9, 1)})
    assert monitor.status({})["history"]["queue_tokens"] == [9] * 120


def test_a_point_of_many_answers_counts_the_newest():
    monitor = Monitor()
    for number in range(3000):
        monitor.answered("POST", "/v1/logprobs", 200, seconds=0.01 if number < 2000 else 0.1, address="10.0.0.1")
    monitor.sample({})
    monitor.sample({})
    curves = monitor.status({})["history"]
    assert curves["p50"][-2:] == curves["p99"][-2:] == [0.1, None]


def test_memory_stays_bounded_however_many_clients_and_errors_come():
    monitor, facts = Monitor(), {"seconds": 0.01, "address": "10.0.0.1"}
    for number in range(1000):
        monitor.answered("POST", "/v1/logprobs", 200, client=f"{number}" * 30, tokens=5, **facts)
        error = ProtocolError(400, "malformed", "x" * 10_000)
        monitor.answered("POST", "/v1/logprobs", 400, error=error, **facts)
    shown = monitor.status({})
    assert len(shown["clients"]) == 50 and len(shown["errors"]) == 20
    assert all(len(error["message"]) == 300 for error in shown["errors"])
    assert shown["requests"] == {"200": 1000, "400": 1000} and shown["latency"]["requests"] == 1000


def test_a_while_in_which_everything_was_refused_has_a_summary_too():
    """It has no latencies, and the server's own thread writes it."""
    monitor, error = Monitor(), ProtocolError(400, "malformed", "no")
    monitor.answered("POST", "/v1/logprobs", 400, seconds=0.01, address="127.0.0.1", error=error)
    summary = monitor.summary({})
    assert "answers 1 x 400; 0 tokens/s" in summary, summary
    assert monitor.summary({}) is None
    assert "answers none" in monitor.summary({"one": (7, 1)})
