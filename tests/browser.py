"""A real Chromium to open pages in.

It is driven through chromedriver's W3C WebDriver interface, which is JSON over HTTP and needs no library.
"""

import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest
import requests
from conftest import free_port

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER) and "CI" not in os.environ,  # which has to have them
    reason="needs Debian's packages chromium and chromium-driver",
)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run"),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
    "--window-size=1280,800",
]


class Browser:
    """One tab of a Chromium."""

    def __init__(self, session: str):
        self.session = session

    def do(self, command: str, **body):
        answer = requests.post(f"{self.session}/{command}", json=body, timeout=60).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def open(self, url: str) -> None:
        self.do("url", url=url)

    def js(self, expression: str):
        return self.do("execute/sync", script=f"return {expression}", args=[])

    def text(self, selector: str) -> str:
        return self.js(f"document.querySelector({json.dumps(selector)}).innerText").replace("\xa0", " ")

    def wait(self, expression: str, seconds: float = 30):
        """Return the value of the expression once it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.js(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.text('body')}"
            time.sleep(0.1)
        return value

    def type_token(self, token: str) -> None:
        element = self.do("element", using="css selector", value="#token")
        self.do(f"element/{next(iter(element.values()))}/value", text=token + "\ue007")  # and Enter

    def press(self, key: str) -> None:
        """Press and release a key by its DOM name, such as ArrowRight, where the focus is."""
        codes = {"End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "PageUp": 33, "PageDown": 34}
        for kind in ("rawKeyDown", "keyUp"):
            self.devtools("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def devtools(self, command: str, **parameters):
        return self.do("goog/cdp/execute", cmd=command, params=parameters)

    def screen(self, width: int, height: int, dark: bool = False) -> None:
        phone = width < 600
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def check_widths(self) -> None:
        """Hold a page to fit a desk's screen and a phone's, light and dark."""
        for dark in (False, True):
            for width in (1280, 700, 375, 320):
                self.screen(width, 800, dark)
                assert not self.js("document.documentElement.scrollWidth > innerWidth"), width

    def console(self) -> list[str]:
        """Return what was logged since the last call: errors, violations of the policy."""
        return [entry["message"] for entry in self.do("se/log", type="browser")]

    def hosts(self) -> set[str]:
        """Return the hosts that got a request since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.do("se/log", type="performance")]
        sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        urls = [urlsplit(event["params"]["request"]["url"]) for event in sent]
        return {url.netloc for url in urls if not url.scheme.startswith(("chrome", "data"))}  # its own new-tab page


@contextmanager
def chromium(folder):
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "FONTCONFIG_FILE")}
    with open(folder / "chromedriver.log", "w") as log:
        driver = subprocess.Popen([DRIVER, f"--port={port}"], env=environment, stdout=log, stderr=subprocess.STDOUT)
    url, session = f"http://127.0.0.1:{port}", None
    options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"]}
    logs = {"browser": "ALL", "performance": "ALL"}
    wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": logs}}
    try:
        deadline = time.monotonic() + 60
        while session is None:
            assert driver.poll() is None and time.monotonic() < deadline, (folder / "chromedriver.log").read_text()
            with suppress(requests.ConnectionError):
                made = requests.post(f"{url}/session", json={"capabilities": wanted}, timeout=60).json()["value"]
                assert "sessionId" in made, made
                session = f"{url}/session/{made['sessionId']}"
        yield Browser(session)
    finally:
        if session:
            requests.delete(session, timeout=60)
        driver.terminate()
        driver.wait(timeout=60)
