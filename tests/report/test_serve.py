"""`grpo report --serve`: the page beside a run that begins, goes on, is resumed, and ends."""

import json
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
from browser import chromium, needs_browser
from conftest import ENVIRONMENT, REPOSITORY
from recorded import completion, write
from servers import wait_until

from grpo.config.errors import ConfigError
from grpo.config.programs import ReportConfig
from grpo.report.page import LivePage, make_server

pytestmark = pytest.mark.plain_start  # half a second, and nothing that is heavy


@contextmanager
def served(*folders):
    """Run the program, yield the URL that it says, and end it with Ctrl-C."""
    command = [sys.executable, "-m", "grpo.report", *map(str, folders), "--serve", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, text=True, **pipes)
    try:
        line = process.stdout.readline()
        assert line.endswith(f"/ shows {', '.join(map(str, folders))} until Ctrl-C\n"), line
        yield line.split()[0]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "") and process.returncode == 0
    finally:
        process.kill()
        process.wait()


class Reader:
    """Asks as the page does."""

    def __init__(self, url: str):
        self.url, self.seen = url, ""

    def ask(self) -> dict | None:
        """Return newer data, or None."""
        answer = requests.get(f"{self.url}data?seen={self.seen}", timeout=10)
        assert answer.status_code in (200, 204)
        if answer.status_code == 204:
            return None
        self.seen = answer.json()["version"]
        return answer.json()

    def next(self) -> dict:
        news = []
        wait_until(lambda: news.append(self.ask()) or news[-1])
        return news[-1]


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def rewards(data: dict) -> list[float]:
    charts = {chart["title"]: chart for section in data["sections"] for chart in section["charts"]}
    return charts["reward"]["curves"]["reward"][0]["values"] if charts else []


def test_a_run_is_followed_from_before_its_first_step(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with served(run) as url:
        reader = Reader(url)
        data = reader.ask()
        assert rewards(data) == [] and data["runs"][0]["steps"] is None
        assert "there is no step yet" in data["runs"][0]["notes"]
        assert reader.ask() is None
        page = requests.get(url, timeout=10)
        assert "connect-src 'self'" in page.text and page.headers["Content-Type"].startswith("text/html")

        write(run, [{"step": 1, "reward": 0.5}], [completion(1)])
        while (data := reader.next())["runs"][0]["notes"]:  # if it was read between two of the files
            pass
        assert rewards(data) == [0.5] and len(data["completions"][0]) == 1
        append(run / "metrics.jsonl", '{"step": 2, "rew')
        data = reader.next()
        assert rewards(data) == [0.5] and "half-written" in data["runs"][0]["notes"][0]
        append(run / "metrics.jsonl", 'ard": 0.75}\n{"step": 3, "reward": 1}\n')
        assert rewards(reader.next()) == [0.5, 0.75, 1]

        # Resumed after step 1: its later steps are cut off, and written again with the same length.
        (run / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.25}\n')
        assert rewards(reader.next()) == [0.5, 0.25]

        shutil.rmtree(run)
        data = reader.next()
        assert rewards(data) == [0.5, 0.25] and data["lost"].startswith(f"runs='{run}': there is no metrics.jsonl")
        write(run, [{"step": 1, "reward": 2}], [])
        while "lost" in (data := reader.next()):
            pass
        assert rewards(data) == [2]


def test_a_large_run_is_not_read_at_every_question(tmp_path, monkeypatch):
    run = write(tmp_path / "run", [{"step": 1, "reward": 1}], [])
    for share, steps in ((1e6, 2), (1e-6, 1)):  # as if the reading had taken no time, and hours
        monkeypatch.setattr("grpo.report.page.SHARE", share)
        (run / "metrics.jsonl").write_text('{"step": 1, "reward": 1}\n')
        page = LivePage([run], 0)
        append(run / "metrics.jsonl", '{"step": 2, "reward": 2}\n')
        assert len(rewards(page.data())) == steps


def test_who_may_not_ask_and_what_cannot_be_served(tmp_path):
    run = write(tmp_path / "run", [{"step": 1, "reward": 1}], [])
    before = sorted(run.iterdir())
    with served(run) as url:
        port = urlsplit(url).port
        # A name of another site that leads here would let its pages read the completions.
        for host in ("evil.example", f"localhost:{port}@evil.example", f"localhost.evil.example:{port}", "["):
            assert requests.get(f"{url}data", headers={"Host": host}, timeout=10).status_code == 403, host
        for host in (f"localhost:{port}", "127.0.0.1"):
            assert requests.get(f"{url}data", headers={"Host": host}, timeout=10).status_code == 200, host
        assert requests.get(f"{url}other", timeout=10).status_code == 404
        expected = f"host='127.0.0.1' port={port}: Address already in use: another process listens there: stop it"
        with pytest.raises(ConfigError, match=f"^{expected}, or choose another port$"):
            make_server(ReportConfig(runs=[str(run)], serve=True, port=port))
    assert sorted(run.iterdir()) == before
    with pytest.raises(ConfigError, match="there is no metrics.jsonl of a run"):
        make_server(ReportConfig(runs=[str(tmp_path / "none")], serve=True, port=0))
    for written in ({"png": True}, {"output": "x"}):
        with pytest.raises(ConfigError, match="^serve=True: it writes no file"):
            ReportConfig(runs=[str(run)], serve=True, **written)


@pytest.mark.rare
@needs_browser
def test_newer_numbers_leave_the_page_as_its_reader_has_set_it(tmp_path):
    def rows(count: int) -> list[dict]:
        return [{"step": step, "reward": 1 + step % 3, "grad_norm": step} for step in range(1, count + 1)]

    def texts(count: int) -> list[dict]:
        return [completion(step, completion=f"number {step}") for step in range(1, count + 1) for _ in range(2)]

    run = tmp_path / "run"
    run.mkdir()
    with served(run) as url, chromium(tmp_path) as browser:
        browser.screen(1280, 900)
        browser.open(url)
        browser.wait("document.querySelector('#notes').textContent.includes('no step yet')")
        write(run, rows(20), texts(20))
        browser.wait("document.querySelectorAll('svg.plot path').length === 4")
        browser.js("document.querySelector('.log').click()")
        browser.js("document.querySelector('#machine').open = true")
        for id, value, event in (("zoom-first", 5, "change"), ("words", "number 7", "input")):
            browser.js(f"document.querySelector('#{id}').value = '{value}'")
            browser.js(f"document.querySelector('#{id}').dispatchEvent(new Event('{event}'))")
        browser.js("document.querySelector('#words').focus()")
        browser.js("document.querySelector('#words').scrollIntoView({behavior: 'instant'})")
        state = (
            "[document.querySelector('.log').getAttribute('aria-pressed'), document.activeElement.id, "
            "document.querySelector('#machine').open, document.querySelector('#zoom-first').value, "
            "document.querySelector('#words').getBoundingClientRect().top, "
            "[...document.querySelectorAll('.completion pre')].map((element) => element.textContent)]"
        )
        before = browser.js(state)
        assert before[-1] == ["number 7"] * 2 and before[:4] == ["true", "words", True, "5"]
        write(run, rows(40), texts(40))
        browser.wait("document.querySelector('#summary').innerText.includes('40')")
        assert browser.js(state) == before
        assert "over steps 5 to 20" in browser.js("document.querySelector('svg.plot').getAttribute('aria-label')")
        assert browser.console() == []
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 1}) + "\n")
        browser.wait("document.querySelectorAll('svg.plot').length === 1")
