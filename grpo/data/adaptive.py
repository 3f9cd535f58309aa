"""Prompts by their own record: those whose groups taught nothing come seldom (dataset_order adaptive)."""

from collections.abc import Mapping, Sequence

import numpy as np

from grpo.data.prompts import PromptStream
from grpo.data.records import Example


class AdaptiveStream(PromptStream):
    """A seeded shuffle of the data, epoch after epoch, in which a prompt may be left out when its turn comes. A prompt
    is taken with the chance (1 + s) / (1 + n): s of its n groups so far had a signal, completions that earned different
    rewards. So a prompt that is always solved, or never, comes more and more seldom, but it comes. (DAPO,
    arXiv:2503.14476, section 3.2, draws such groups first and then replaces them.) The prompts of a round follow from
    the signals of the rounds before it, less `max_lag` for workers that draw ahead."""

    def __init__(
        self, examples: Sequence[Example], prompts_per_step: int, seed: int, steps_per_round: int = 1, max_lag: int = 0
    ):
        super().__init__(examples, prompts_per_step, seed)
        self._steps, self._lag = steps_per_round, max_lag
        self._rounds: list[np.ndarray] = []  # the places of each round's prompts: int64 [groups of a round]
        self._turn, self._epoch_of = 0, (-1, np.zeros(0, np.int64), np.zeros(0))
        self._groups, self._taught = np.zeros((2, self._size), np.int64)  # of each prompt, all and those with a signal
        self._recorded = 0  # rounds that these count

    def record(self, signals: Sequence[Mapping[int, bool]]) -> None:
        """Add a round's signals, by the id of its groups: what each rank has."""
        by_group = {group: signal for of_rank in signals for group, signal in of_rank.items()}
        self.signals += "".join("01"[by_group[group]] for group in sorted(by_group))

    def _indices(self, step: int) -> np.ndarray:
        number, place = divmod(step, self._steps)
        while len(self._rounds) <= number:
            self._rounds.append(self._choose(len(self._rounds) - self._lag))
        return self._rounds[number][place * self._per_step : (place + 1) * self._per_step]

    def _choose(self, before: int) -> np.ndarray:
        """Choose the prompts of the next round by the signals of the rounds before this one: int64 [groups]."""
        size = self._steps * self._per_step
        for number in range(self._recorded, before):
            signals = np.frombuffer(self.signals[number * size : (number + 1) * size].encode(), np.uint8) == ord("1")
            np.add.at(self._groups, self._rounds[number], 1)
            np.add.at(self._taught, self._rounds[number], signals)
        self._recorded = max(self._recorded, before)
        chosen: list[int] = []
        while len(chosen) < size:
            epoch, turn = divmod(self._turn, self._size)
            if self._epoch_of[0] != epoch:
                rng = np.random.default_rng((self._seed, epoch))
                self._epoch_of = epoch, rng.permutation(self._size), rng.random(self._size)
            place, number = self._epoch_of[1][turn], self._epoch_of[2][turn]
            in_step = chosen[len(chosen) // self._per_step * self._per_step :]
            if number * (1 + self._groups[place]) < 1 + self._taught[place] and place not in in_step:
                chosen.append(place)
            self._turn += 1
        return np.array(chosen)
