"""The unit and the compose file: options that the server knows, and more time to stop than it takes."""

import shlex
import shutil
import subprocess
from dataclasses import fields

import pytest
import yaml
from conftest import REPOSITORY

from grpo.config.command_line import parse_arguments
from grpo.config.server import ServerConfig

EXAMPLES = REPOSITORY / "examples"
PAGE = (REPOSITORY / "docs/reference_server.md").read_text()
UNIT, COMPOSE = EXAMPLES / "ref_server.service", EXAMPLES / "compose.yaml"


def unit() -> dict[str, str]:
    """Its last assignment of each key."""
    joined = UNIT.read_text().replace("\\\n", " ")
    lines = [line.split("=", 1) for line in joined.splitlines() if "=" in line and not line.startswith("#")]
    return {key.strip(): value.strip() for key, value in lines}


def service() -> dict:
    return yaml.safe_load(COMPOSE.read_text())["services"]["ref_server"]


def parsed(options: list[str], token_path: str, tmp_path) -> ServerConfig:
    """By the server's own parser, which reads the token: from a file here."""
    (tmp_path / "token").write_text("secret\n")
    assert any(token_path in option for option in options)
    return parse_arguments(
        ServerConfig, "", [option.replace(token_path, str(tmp_path / "token")) for option in options]
    )


def test_the_unit_starts_the_server_and_gives_it_time_to_stop(tmp_path):
    python, script, *options = shlex.split(unit()["ExecStart"])
    assert python.startswith("/") and script == "ref_server.py"
    config = parsed(options, "%d/token", tmp_path)
    assert config.token == "secret" and unit()["LoadCredential"].startswith("token:")
    assert float(unit()["TimeoutStopSec"]) > config.drain_timeout


def test_a_gpu_is_left_in_reach_of_the_unit():
    assert not {"PrivateDevices", "MemoryDenyWriteExecute"} & unit().keys()


def test_the_compose_file_starts_the_server_and_gives_it_time_to_stop(tmp_path):
    config = parsed(service()["command"], "/run/secrets/token", tmp_path)
    assert config.token == "secret" and service()["secrets"] == ["token"]
    assert float(service()["stop_grace_period"].removesuffix("s")) > config.drain_timeout
    assert service()["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    assert f":{config.port}/health" in service()["healthcheck"]["test"][-1]


def test_the_health_check_fails_on_a_server_that_is_not_there():
    _, _, dash_c, script = service()["healthcheck"]["test"]
    free = script.replace("59875", "1")
    assert dash_c == "-c" and subprocess.run(["python3", "-c", free], capture_output=True).returncode == 1


def test_what_the_image_is_built_of_is_there():
    build = service()["build"]
    context = (EXAMPLES / build["context"]).resolve()
    lines = (context / build["dockerfile"]).read_text().splitlines()
    copied = [line.split()[1] for line in lines if line.startswith("COPY")]
    assert copied and all((context / name).exists() for name in copied)


def test_systemd_takes_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    # It looks whether the program is there, so the copy names one that is.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/grpo-ref-split/.venv/bin/python", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert done.returncode == 0 and UNIT.name not in done.stderr, done.stderr


def test_docker_takes_the_compose_file():
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("no docker compose here")
    done = subprocess.run(
        ["docker", "compose", "-f", str(COMPOSE), "config", "--quiet"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_page_has_every_option():
    assert not [field.name for field in fields(ServerConfig) if f"`{field.name}`" not in PAGE]


def test_the_scrape_configuration_is_yaml():
    [job] = yaml.safe_load(PAGE.split("```yaml\n")[1].split("```")[0])["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{ServerConfig().port}"]
