"""A game as an environment: the model guesses a number, and is told "higher" or "lower" until it has found it."""


class GuessTheNumber:
    """One game. `--environment examples/guess_the_number/environment.py:GuessTheNumber` makes one for a completion."""

    is_verdict = True  # evaluation: a game that earns anything is won

    def reset(self, columns: dict) -> str:
        """Begin the game of a row of the dataset; return what is said first, which ends the prompt."""
        self.secret, self.guesses = int(columns["secret"]), 0
        return f" It is from 1 to {columns['largest']}."

    def step(self, text: str) -> tuple[str, float, bool]:
        """Take a turn of the model; return what it is told, the reward of this turn, and whether the game is over.

        A number found at once earns 1, and 0.1 less for each guess before.
        """
        self.guesses += 1
        try:
            guess = int(text)
        except ValueError:
            return "a number", 0.0, False
        if guess == self.secret:
            return "", max(0.1, 1.1 - 0.1 * self.guesses), True
        return "higher" if guess < self.secret else "lower", 0.0, False
