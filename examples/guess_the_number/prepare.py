"""Write the game's data, and build a Qwen2 of 0.1 M parameters that knows the rules but mostly plays lucky numbers.

    python -m examples.guess_the_number.prepare

The model first learns from games of a player who guesses at random among the numbers that are still possible, then from
one who takes most guesses among three lucky numbers. Nobody shows it that the middle is the best guess.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from demo.model import CHAT_TEMPLATE, START, begin, build_model, save, train, train_tokenizer
from examples.guess_the_number.environment import GuessTheNumber

LARGEST, MAX_TURNS = 15, 6
LUCKY = (3, 7, 13)
QUESTION = "I think of a number."


@dataclass(frozen=True)
class Game:
    """A game with this secret."""

    secret: int

    @property
    def row(self) -> dict:
        """The game as a row of the dataset."""
        return {"question": QUESTION, "secret": self.secret, "largest": LARGEST}

    @property
    def question(self) -> str:
        """What the model reads first: the row's question, and what the environment adds to it."""
        return QUESTION + GuessTheNumber().reset(self.row)


def play(game: Game, superstition: float, rng: random.Random) -> str:
    """Return a whole game with what the player is told, who plays lucky numbers with this chance."""
    environment, text = GuessTheNumber(), ""
    environment.reset(game.row)
    low, high = 1, LARGEST
    for turn in range(1, MAX_TURNS + 1):
        guess = rng.choice(LUCKY) if rng.random() < superstition else rng.randint(low, high)
        answer, _, is_over = environment.step(str(guess))
        text += str(guess)
        if is_over or turn == MAX_TURNS:
            break
        text += f"<|im_end|>\n<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\n"
        low, high = (max(low, guess + 1), high) if answer == "higher" else (low, min(high, guess - 1))
    return text


def games(superstition: float, rng: random.Random) -> Iterator[tuple[Game, str]]:
    """Draw games without end, with the player's turns."""
    while True:
        game = Game(rng.randint(1, LARGEST))
        yield game, play(game, superstition, rng)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer on the words of the game. Each number is a token, and so is what begins a turn."""
    tokens = [str(number) for number in range(1, LARGEST + 1)]
    tokens += ["\n<|im_start|>user\n", "\n<|im_start|>assistant\n"]
    words = f"user\n{Game(1).question}\nassistant\nhigher\nlower\na number"
    return train_tokenizer(iter([words] * 10), [START], tokens, CHAT_TEMPLATE)


def build(folder: Path, seed: int) -> None:
    """Build the model and write it with its tokenizer to `folder`, which must not exist, in Hugging Face format."""
    rng, tokenizer = begin(folder, seed), build_tokenizer()
    model = build_model(tokenizer)
    train(model, tokenizer, games(0.0, rng), name="learning the game", updates=500, learning_rate=6e-3)
    train(model, tokenizer, games(0.7, rng), name="becoming superstitious", updates=100, learning_rate=2e-3)
    save(folder, model, tokenizer)


def write_dataset(folder: Path, seed: int) -> None:
    """Write train.jsonl, 992 games in random order, and test.jsonl, one with each secret."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [Game(secret).row for secret in range(1, LARGEST + 1)]
    shuffled = random.Random(seed).sample(32 * rows, 32 * len(rows))
    for name, chosen in (("train", shuffled), ("test", rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/guess_the_number"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args()
    write_dataset(arguments.folder / "data", arguments.seed)
    build(arguments.folder / "model", arguments.seed)
