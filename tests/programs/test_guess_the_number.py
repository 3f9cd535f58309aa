"""The example of a game: its rules, its data and the player that its model learns from."""

import json
import random
import re

import pytest
from conftest import REPOSITORY

from examples.guess_the_number.environment import GuessTheNumber
from examples.guess_the_number.prepare import LARGEST, LUCKY, MAX_TURNS, Game, build_tokenizer, play, write_dataset
from grpo.config.command_line import parse_arguments
from grpo.config.trainer import TrainerConfig
from grpo.tools.session import EnvironmentClass

FOLDER = REPOSITORY / "examples/guess_the_number"
ROW = {"question": "I think of a number.", "secret": 9, "largest": 15}


def test_a_game_says_higher_and_lower_until_the_number_is_found():
    game = GuessTheNumber()
    assert game.reset(ROW) == " It is from 1 to 15."
    said = [game.step(text) for text in ("3", "12", "9 or so", "9")]
    assert said[:3] == [("higher", 0.0, False), ("lower", 0.0, False), ("a number", 0.0, False)]
    assert said[3] == ("", pytest.approx(0.7), True)


def test_a_number_found_earlier_is_worth_more_and_every_one_something():
    rewards = []
    for wrong in range(20):
        game = GuessTheNumber()
        game.reset(ROW)
        for _ in range(wrong):
            game.step("1")
        rewards.append(game.step("9")[1])
    assert rewards[0] == 1.0 and rewards[:10] == sorted(set(rewards[:10]), reverse=True) and min(rewards) > 0


def test_it_is_an_environment_whose_reward_is_a_verdict():
    environment = EnvironmentClass(f"{FOLDER}/environment.py:GuessTheNumber")
    assert environment.is_game and environment.gives_reward and environment.type.is_verdict


@pytest.mark.parametrize("superstition", [0.0, 0.7])
def test_the_player_guesses_what_is_possible_or_lucky(superstition):
    lucky = total = 0
    for seed in range(300):
        game = Game(seed % LARGEST + 1)
        text = play(game, superstition, random.Random(seed))
        turns = re.findall(r"(\d+)(?:<\|im_end\|>\n<\|im_start\|>user\n(\w+))?", text)
        low, high = 1, LARGEST
        assert len(turns) <= MAX_TURNS
        for guess, said in turns:
            is_possible = low <= int(guess) <= high
            assert is_possible or (superstition > 0 and int(guess) in LUCKY)
            lucky, total = lucky + (not is_possible), total + 1
            low = max(low, int(guess) + 1) if said == "higher" else low
            high = min(high, int(guess) - 1) if said == "lower" else high
        assert turns[-1][1] == "" and (int(turns[-1][0]) == game.secret or len(turns) == MAX_TURNS)
    assert (lucky > total / 4) == (superstition > 0)


def test_each_number_is_a_token():
    tokenizer = build_tokenizer()
    assert [len(tokenizer.encode(str(number))) for number in range(1, LARGEST + 1)] == [1] * LARGEST


def test_the_settings_name_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    write_dataset(tmp_path, seed=0)
    train, test = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    assert [row["secret"] for row in test] == list(range(1, LARGEST + 1)) and len(train) == 32 * LARGEST
    config = parse_arguments(
        TrainerConfig, "", ["--config", f"{FOLDER}/settings.yaml", "--dataset_name", str(tmp_path)]
    )
    assert config.max_turns == MAX_TURNS and config.eval_samples == len(test)
    assert config.dataset_prompt_column in train[0] and config.dataset_answer_column in train[0]
