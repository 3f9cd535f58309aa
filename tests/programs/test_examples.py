"""The examples: the unit and the compose file of a server, tasks with their rewards, a game, GRPO on one page."""

import random
import re
import shlex
import shutil
import subprocess
from dataclasses import fields
from importlib import import_module
from itertools import islice

import pytest
import yaml
from conftest import REPOSITORY, run_python
from trainer_runs import finish, lines, options, reference, timeless

import examples.countdown.task as countdown
import examples.python_tests.task as python_tests
import examples.sql.task as sql
from demo.task import write_splits
from examples import one_page, prepare
from examples.guess_the_number.environment import GuessTheNumber
from examples.guess_the_number.prepare import LARGEST, LUCKY, MAX_TURNS, Game, build_tokenizer, play, write_dataset
from grpo.config.command_line import parse_arguments
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig
from grpo.rewards.compute import load_reward_funcs
from grpo.tools.session import EnvironmentClass

EXAMPLES = REPOSITORY / "examples"
GAME = EXAMPLES / "guess_the_number"
PAGE = (REPOSITORY / "docs/reference_server.md").read_text()
UNIT, COMPOSE = EXAMPLES / "ref_server.service", EXAMPLES / "compose.yaml"
SERVICE = yaml.safe_load(COMPOSE.read_text())["services"]["ref_server"]


def parsed(options: list[str], token_path: str, tmp_path, program: type = ServerConfig):
    """By the program's own parser, which reads the token: from a file here."""
    (tmp_path / "token").write_text("secret\n")
    assert any(token_path in option for option in options)
    config = parse_arguments(program, "", [option.replace(token_path, str(tmp_path / "token")) for option in options])
    assert config.token == "secret"
    return config


def test_the_unit_starts_the_server_with_a_gpu_in_reach_and_gives_it_time_to_stop(tmp_path):
    joined = UNIT.read_text().replace("\\\n", " ")
    pairs = [line.split("=", 1) for line in joined.splitlines() if "=" in line and not line.startswith("#")]
    unit = {key.strip(): value.strip() for key, value in pairs}
    python, script, *options = shlex.split(unit["ExecStart"])
    assert python.startswith("/") and script == "ref_server.py"
    assert unit["LoadCredential"].startswith("token:")
    assert float(unit["TimeoutStopSec"]) > parsed(options, "%d/token", tmp_path).drain_timeout
    assert not {"PrivateDevices", "MemoryDenyWriteExecute"} & unit.keys()
    if shutil.which("systemd-analyze"):
        # It looks whether the program is there, so the copy names one that is.
        copy = tmp_path / UNIT.name
        copy.write_text(UNIT.read_text().replace("/opt/grpo-ref-split/.venv/bin/python", "/bin/true"))
        ended = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
        assert ended.returncode == 0 and UNIT.name not in ended.stderr, ended.stderr


def test_the_compose_file_starts_the_server_and_gives_it_time_to_stop(tmp_path):
    program, *words = SERVICE["command"]
    config = parsed(words, "/run/secrets/token", tmp_path)
    assert program == "ref_server.py"
    assert SERVICE["secrets"] == ["token"]
    assert float(SERVICE["stop_grace_period"].removesuffix("s")) > config.drain_timeout
    assert SERVICE["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    _, _, dash_c, script = SERVICE["healthcheck"]["test"]
    assert f":{config.port}/health" in script
    nobody_there = ["python3", "-c", script.replace(str(config.port), "1")]
    assert dash_c == "-c" and subprocess.run(nobody_there, capture_output=True).returncode == 1
    context = (EXAMPLES / SERVICE["build"]["context"]).resolve()
    dockerfile = (context / SERVICE["build"]["dockerfile"]).read_text()
    copied = [name for line in dockerfile.splitlines() if line.startswith("COPY") for name in line.split()[1:-1]]
    assert copied and all((context / name).exists() for name in copied)
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        command = ["docker", "compose", "-f", str(COMPOSE), "config", "--quiet"]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr


def test_the_page_of_the_server_has_every_option_and_a_scrape_configuration():
    assert not [field.name for field in fields(ServerConfig) if f"`{field.name}`" not in PAGE]
    [job] = yaml.safe_load(PAGE.split("```yaml\n")[1].split("```")[0])["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{ServerConfig().port}"]


def test_a_game_says_higher_and_lower_and_a_number_found_earlier_is_worth_more():
    game = GuessTheNumber()
    row = {"question": "I think of a number.", "secret": 9, "largest": 15}
    assert game.reset(row) == " It is from 1 to 15."
    answers = [game.step(text) for text in ("3", "12", "9 or so", "9")]
    assert answers[:3] == [("higher", 0.0, False), ("lower", 0.0, False), ("a number", 0.0, False)]
    assert answers[3] == ("", pytest.approx(0.7), True)
    rewards = []
    for wrong in range(20):
        game.reset(row)
        for _ in range(wrong):
            game.step("1")
        rewards.append(game.step("9")[1])
    assert rewards[0] == 1.0 and rewards[:10] == sorted(set(rewards[:10]), reverse=True) and min(rewards) > 0


@pytest.mark.parametrize("superstition", [0.0, 0.7])
def test_the_player_guesses_what_is_possible_or_lucky(superstition):
    lucky = total = 0
    for seed in range(300):
        game = Game(seed % LARGEST + 1)
        text = play(game, superstition, random.Random(seed))
        turns = re.findall(r"(\d+)(?:<\|im_end\|>\n<\|im_start\|>user\n(\w+))?", text)
        low, high = 1, LARGEST
        assert len(turns) <= MAX_TURNS
        for guess, answer in turns:
            is_possible = low <= int(guess) <= high
            assert is_possible or (superstition > 0 and int(guess) in LUCKY)
            lucky, total = lucky + (not is_possible), total + 1
            low = max(low, int(guess) + 1) if answer == "higher" else low
            high = min(high, int(guess) - 1) if answer == "lower" else high
        assert turns[-1][1] == "" and (int(turns[-1][0]) == game.secret or len(turns) == MAX_TURNS)
    assert (lucky > total / 4) == (superstition > 0)


def test_the_settings_of_the_game_name_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    write_dataset(tmp_path, seed=0)
    train, test = (lines(tmp_path / f"{name}.jsonl") for name in ("train", "test"))
    assert [row["secret"] for row in test] == list(range(1, LARGEST + 1)) and len(train) == 32 * LARGEST
    words = ["--config", f"{GAME}/settings.yaml", "--dataset_name", str(tmp_path)]
    config = parse_arguments(TrainerConfig, "", words)
    assert config.max_turns == MAX_TURNS and config.eval_samples == len(test)
    assert config.dataset_prompt_column in train[0] and config.dataset_answer_column in train[0]
    environment = EnvironmentClass(f"{GAME}/environment.py:GuessTheNumber")
    assert environment.is_game and environment.gives_reward and environment.type.is_verdict
    tokenizer = build_tokenizer()
    assert all(len(tokenizer.encode(str(number))) == 1 for number in range(1, LARGEST + 1))


def rewards_of(task, problems: list, texts: list[str]) -> list[float]:
    rows = [task.row_of(problem) for problem in problems]
    return task.reward(texts, **{name: [row[name] for row in rows] for name in rows[0]})


@pytest.mark.parametrize("name", prepare.EXAMPLES)
def test_a_task_rewards_what_is_right_and_its_settings_name_what_there_is(name, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    task, rng = import_module(f"examples.{name}.task"), random.Random(0)
    problems = [*islice(task.problems(rng, False), 20)]
    assert rewards_of(task, problems, [task.right(problem, rng) for problem in problems]) == [1.0] * 20
    assert sum(rewards_of(task, problems, [task.wrong(problem, rng) for problem in problems])) < 8
    assert rewards_of(task, problems[:1], [""]) == [0.0]
    write_splits(tmp_path, 0, task.problems, task.row_of, train_size=task.TRAIN, test_size=task.TEST)
    train, test = (lines(tmp_path / f"{split}.jsonl") for split in ("train", "test"))
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    config = parse_arguments(TrainerConfig, "", ["--config", f"examples/{name}/settings.yaml"])
    assert load_reward_funcs(config.reward_funcs)["reward"].__code__.co_filename.endswith(f"{name}/task.py")
    assert config.prompts_per_step <= len(train) and config.model_name_or_path == f"runs/{name}/model"


@pytest.mark.parametrize(
    "text", ["9**2", "1+1", "2+7+9-9", "(9", "f(2)", "True+7", "2+7" + " " * 99, "9/0", "[9]", "7+2.0"]
)
def test_no_other_calculation_makes_the_number(text):
    problem = countdown.Problem((2, 7, 8), 9)
    assert not countdown.solves(text, problem.numbers, problem.target)
    assert countdown.solves("(8-7)+8", (7, 8, 8), 9) and countdown.solves("8/2+7", (2, 7, 8), 11)


HARMFUL = {
    "while True: pass": 0.0,
    "x = bytearray(1 << 30)\ndef f(x): return x": 0.0,
    "open('big', 'wb').write(bytes(2 << 20))\ndef f(x): return x": 0.0,
    "import os\nos.write(1, bytes(2 << 20))\ndef f(x): return x": 0.0,
    "raise SystemExit": 0.0,
    "def f(x): return 'x'": 0.0,
    "def f(x): return x + (x > 0)": 0.6,
    "import os\nprint(1)\ndef f(x): return x + len(os.environ.get('HOME', ''))": 1.0,  # no environment
    "def f(x): return x \0": 0.0,
}


@pytest.mark.parametrize("code", HARMFUL)
def test_code_runs_within_limits_and_earns_the_share_of_tests_that_it_passes(code):
    assert python_tests.share_passed(code, [-1, 0, 1, 2, -5], [-1, 0, 1, 2, -5]) == HARMFUL[code]


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM people",
        "PRAGMA writable_schema = 1",
        "ATTACH 'other' AS other",
        "SELECT count(*) FROM people WHERE team = 'legal' AND age > 40; DROP TABLE people",
        "SELECT count(*) FROM people a, people b, people c, people d",
        "SELECT count(*) FROM sqlite_master, nothing",
        "SELECT hex(zeroblob(1000000000))",
        "SELECT 1 \0",
    ],
)
def test_a_query_can_only_read_and_not_for_long(query):
    problem = sql.Problem("many", "legal", 40)
    before, after = (rewards_of(sql, [problem] * 2, [text, problem.query]) for text in (query, query.lower()))
    assert before == after == [0.0, 1.0]
    assert sql.reward([query], query=["SELECT nothing"]) == [0.0]  # not even where the gold query fails too


@pytest.mark.rare
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", prepare.EXAMPLES)
def test_a_tiny_model_learns_the_task(name, tmp_path):
    run_python("-m", "examples.prepare", name, "--folder", tmp_path, check=True, timeout=600)
    words = ["--config", f"examples/{name}/settings.yaml", "--nproc_per_node", "1", "--output_dir", tmp_path / "run"]
    words += ["--model_name_or_path", tmp_path / "model", "--dataset_name", tmp_path / "data"]
    run_python("-m", "grpo.launch", *words, check=True, timeout=600)
    rewards = [row["reward"] for row in lines(tmp_path / "run/metrics.jsonl") if row["step"]]
    assert sum(rewards[-5:]) / 5 > rewards[0] + 0.3, rewards


@pytest.mark.slow
def test_the_page_computes_what_the_trainer_computes(model_folder, data_folder, tmp_path):
    """Five steps of the same run: loss, rewards and the gradient's norm."""
    with reference(model_folder, tmp_path / "server") as server:
        changes = {"max_steps": 5, "ref_servers": server.url, "eval_steps": 0, "warmup_steps": 2, "learning_rate": 1e-3}
        finish(1, options(model_folder, data_folder, tmp_path / "run", **changes))
        settings = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
        names = {field.name for field in fields(TrainerConfig)}
        given = {name: value for name, value in settings.items() if name in names and name != "deepspeed"}
        rows = one_page.main(TrainerConfig(**given | {"port": server.port}))
    expected = [row for row in timeless(tmp_path / "run") if row["step"]]
    assert len(rows) == 5 and rows[-1]["eval_accuracy"] >= 0
    for name in ("loss", "reward", "grad_norm"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in expected], rel=1e-6, abs=1e-6), name
