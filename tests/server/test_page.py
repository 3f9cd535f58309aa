"""The server's live page in a real Chromium, before a server under load: a person's view, and its refusals."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import numpy as np
import pytest
import requests
from browser import chromium, needs_browser
from conftest import Server, running_server
from faulty_server import code_for, hold_loading
from pools import running_pool
from safetensors.numpy import save
from stored import PROBE, RUN, drawn, sha, weights

from grpo.pool.protocol import Lease, Task, Version
from grpo.pool.task_tensors import encode_drawn, encode_tasks
from grpo.wire.logprobs import LogprobsRequest, encode_request

pytestmark = [pytest.mark.rare, needs_browser]
HOSTILE = '<img src=x onerror="document.title=window.pwned=1"><script>window.pwned=1</script>'


@pytest.fixture
def browser(tmp_path):
    with chromium(tmp_path) as page:
        page.screen(1280, 800)
        yield page


@contextmanager
def load(server: Server, *clients: str):
    """Ask all the time, in these names."""
    stop = threading.Event()

    def ask(client: str) -> None:
        completions = [list(range(5, 5 + n)) for n in (20, 40, 30, 35)]
        body = encode_request(LogprobsRequest.of(list(range(5, 30)), completions, 1.0, client=client))
        while not stop.is_set():
            with suppress(requests.ConnectionError):
                requests.post(f"{server.url}/v1/logprobs", data=body, timeout=60)
            stop.wait(0.02)

    with ThreadPoolExecutor(len(clients)) as threads:
        for client in clients:
            threads.submit(ask, client)
        try:
            yield
        finally:
            stop.set()


READY = "document.querySelector('#status').textContent === 'ready'"
LOST = "document.querySelector('#status').textContent === 'no answer'"
POINTS = "(document.querySelector('#throughput .curve').getAttribute('d') || '').split('L').length"


def test_it_shows_what_the_server_does(model_folder, tmp_path, browser):
    with running_server(model_folder, tmp_path) as server:
        browser.open(server.url)
        browser.wait(READY)
        assert browser.text("#model") == str(model_folder) and "cpu" in browser.text("#facts")
        assert browser.text("#clients p") == browser.text("#errors p").replace("None.", "None yet.") == "None yet."
        with load(server, "trainer-0", "demo, rank 1 of 2, box #0123abcd"):
            browser.wait(f"{POINTS} >= 3 && document.querySelector('#now').textContent > '0'")
            before = browser.text("#codes")
            browser.wait(f"document.querySelector('#codes').innerText !== {json.dumps(before)}")
            assert requests.post(f"{server.url}/v1/logprobs", data=b"hello", timeout=60).status_code == 400
            browser.wait("document.querySelector('#error-rows').innerText.includes('400 malformed')")
            assert {"trainer-0", "demo", "rank 1 of 2, box"} <= set(re.split("[\n\t]", browser.text("#client-rows")))
            for id in ("p50", "p99"):
                assert browser.text(f"#{id}").endswith("s")
            for id in ("fill", "sharing", "packing"):
                assert browser.text(f"#{id}").endswith(" %")
            assert "iB process" in browser.text("#memory")
            assert browser.js("document.title").startswith(browser.text("#now"))
            check_charts(browser)
            browser.check_widths()
        assert browser.hosts() == {urlsplit(server.url).netloc}
        assert browser.console() == []


def check_charts(browser):
    """Each has a curve and says its numbers in words, at the pointer too."""
    for id in ("throughput", "latency", "queue", "busy", "memory", "batches"):
        browser.wait(f"document.querySelector('#{id} .curve:not(.second)').getAttribute('d').includes('L')")
        words = browser.js(f"document.querySelector('#{id} svg').getAttribute('aria-label')").replace("\xa0", " ")
        assert "over the last 10 min: now" in words and "NaN" not in words, words
    browser.wait("!busy && (clearTimeout(timer), busy = true, pointed = 0.75, draw(), true)")
    assert browser.text("#queue .reading").endswith("2 min ago")
    browser.js("(pointed = null, busy = false, poll(), 0)")


def test_it_says_when_the_server_is_gone_and_when_it_is_back(model_folder, tmp_path, browser):
    with running_server(model_folder, tmp_path) as server:
        browser.open(server.url)
        browser.wait(READY)
        server.end()
        browser.wait(LOST)
        first = browser.text("#since")
        assert first.startswith(" since ") and browser.js("document.querySelector('main').className") == "stale"
        browser.wait(f"document.querySelector('#since').innerText !== {json.dumps(first)}")
    # Loading until it was seen, to see what the page makes of a server without numbers.
    go = tmp_path / "go"
    code = code_for(hold_loading, str(go))
    with running_server(model_folder, tmp_path, port=server.port, code=code, awaited=False):
        browser.wait("document.querySelector('#status').textContent === 'loading'")
        go.touch()
        browser.wait(READY)
        assert browser.text("#since") == "" and browser.js("document.querySelector('main').className") == ""
        assert all("ERR_CONNECTION" in line or "ERR_EMPTY" in line for line in browser.console())


def test_it_asks_for_the_token_and_keeps_it_in_the_tab(model_folder, tmp_path, browser):
    with running_server(model_folder, tmp_path, environment={"GRPO_REF_TOKEN": "quite-secret"}) as server:
        browser.open(server.url)
        browser.wait("!document.querySelector('#ask').hidden")
        assert browser.text("#wrong") == "" and str(model_folder) not in browser.text("body")
        assert browser.js("document.title") == "locked · GRPO server"  # whatever its task
        for wrong in ("another", "ключ"):
            browser.type_token(wrong)
            browser.wait("document.querySelector('#wrong').innerText === 'The server refuses this token.'")
            assert browser.js("document.querySelector('#numbers').hidden")
        browser.type_token("quite-secret")
        browser.wait(READY)
        assert browser.text("#model") == str(model_folder) and browser.js("document.querySelector('#ask').hidden")
        assert browser.js("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        assert "secret" not in browser.js("location.href + document.documentElement.outerHTML")
        browser.open(server.url)
        browser.wait(READY)
        assert all(" 401 " in line for line in browser.console())


def test_what_strangers_send_is_shown_and_never_run(server, browser):
    names = [HOSTILE, "x" * 128, "\u202e" + "Ω\n" * 60]
    for name in names:
        body = encode_request(LogprobsRequest.of([5], [[6]], 1.0, client=name))
        assert requests.post(f"{server.url}/v1/logprobs", data=body, timeout=60).status_code == 200
    ones = np.ones(1, np.int32)
    refused = save(dict.fromkeys(["input_ids", "prompt_lengths", "completion_lengths", HOSTILE], ones))
    error = requests.post(f"{server.url}/v1/logprobs", data=refused, timeout=60).json()["error"]
    assert HOSTILE[:20] in error["message"]
    browser.screen(375, 812)
    browser.open(server.url)
    browser.wait(READY)
    assert HOSTILE[:40] in browser.text("#client-rows") and HOSTILE[:20] in browser.text("#error-rows")
    assert browser.js("[window.pwned ?? null, document.images.length, document.scripts.length]") == [None, 0, 1]
    browser.check_widths()
    assert browser.console() == [] and browser.hosts() == {urlsplit(server.url).netloc}


@pytest.mark.parametrize("path", ["/some/prefix", "/some/prefix/"])
def test_it_works_behind_a_proxy_with_a_prefix(server, browser, path):
    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self):
            inner = self.path.removeprefix("/some/prefix")
            answer = requests.get(server.url + (inner or "/"), timeout=60)
            self.send_response(answer.status_code if inner != self.path else 404)
            for name in ("Content-Type", "Content-Security-Policy"):
                self.send_header(name, answer.headers.get(name, ""))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{proxy.server_port}{path}")
        browser.wait(READY)
        proxy.shutdown()


def test_a_pools_page_shows_workers_and_rounds(tmp_path, browser):
    def post(path: str, body: bytes, **query) -> None:
        headers = {"Content-Type": "application/octet-stream"}
        requests.post(f"{server.url}/v1/rollouts/{path}", data=body, params=query, headers=headers, timeout=10)

    def lease(name: str, card: str) -> None:
        numbers = {"room": 1, "holds": [], "wait": 0.0, "version": 0, "tokens_per_second": 1234.0}
        post("lease", Lease(worker=name, card=card, message="draws 1 group", **numbers).to_json())

    with running_pool(tmp_path) as server:
        browser.open(server.url)
        browser.wait(READY)
        assert browser.js("document.title").endswith(" · pool of rollouts")
        assert browser.text("#model") == "no run yet" and "generate.py --pool" in browser.text("#no-workers")
        data, tasks = weights(0), [Task(group=group, attempt=0, version=0, prompt_ids=[7]) for group in range(4)]
        post("files", data, sha256=sha(data), size=len(data), offset=0)
        post("run", RUN.to_json())
        version = Version(version=0, sha256=sha(data), size=len(data), whole=True, base=None, delta=None, probe=PROBE)
        post("versions", version.to_json())
        post("tasks", encode_tasks(tasks))
        lease("box #1a2b3c4d", "RTX 4090")
        post("results", encode_drawn([drawn(tasks[0])], [(0, sha(data))]), worker="box #1a2b3c4d")
        lease("box #1a2b3c4d", "RTX 4090")
        lease(HOSTILE, "card " * 24)
        for _ in range(3):
            wrong = replace(drawn(tasks[1]), logprobs=[[0.5] * 2, [0.5] * 4])
            post("results", encode_drawn([wrong], [(0, sha(data))]), worker=HOSTILE)
        browser.wait("document.querySelector('#worker-rows').innerText.includes('suspended')")
        assert browser.text("#model") == "runs/a" and "version 0" in browser.text("#facts")
        apart, honest = browser.text("#worker-rows").split("box #1a2b3c4d")
        assert HOSTILE in apart and "a log-prob is above 0" in apart
        words = [word for word in re.split("[\n\t]", honest) if word][:5]
        assert words == ["RTX 4090", "draws 1 group", "drawing", "0", "1.23 k"]
        assert re.split("[\n\t]", browser.text("#round-rows"))[:8] == ["1", "0", "0 of 2", "0", "0", "0", "1 of 2", "6"]
        assert (browser.text("#leased"), browser.text("#undrawn")) == ("1", "2")
        browser.check_widths()
        assert not browser.js("document.querySelector('#latency').offsetParent") and not browser.js("window.pwned")
        assert browser.console() == []
