"""What the worker batches, in which order, and what it does when a pass fails. The model is real; a hook before its
body holds a pass back until the queue is as the test wants it, notes what is fed, and breaks what should break."""

import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from test_logprobs import CONFIGS, build

from grpo.batch import Batcher
from grpo.logprobs import token_logprobs
from grpo.model import make_batcher
from grpo.protocol import LogprobsRequest, ProtocolError
from grpo.scorer import Scorer


class Desk:
    """A scorer whose first pass waits until `go`, with the rows that each later pass fed."""

    def __init__(
        self, budget: int, config: str = "qwen2", fits: int = 10**9, poison: int | None = None, error=ValueError
    ):
        self.model, self.plain = build(CONFIGS[config]), build(CONFIGS[config])
        self.batcher = make_batcher(self.model, 0)
        self.passes: list[torch.Tensor] = []
        self.dead: list[Exception] = []
        self._busy, self._go = threading.Event(), threading.Event()
        self._fits, self._poison, self._error = fits, poison, error
        self.model.base_model.register_forward_pre_hook(self._before, with_kwargs=True)
        self.scorer = Scorer(self.model, self.batcher, budget, 10**6, self.dead.append)
        self.first = self.ask([63], [[62]])
        assert self._busy.wait(30)

    def _before(self, module, positional, options):
        self._busy.set()
        assert self._go.wait(30)
        ids = options["input_ids"]
        self.passes.append(ids)
        if ids.numel() > self._fits:
            raise torch.OutOfMemoryError("the device is full")
        if self._poison is not None and (ids == self._poison).any():
            raise self._error(f"token {self._poison} hurts")

    def ask(self, prompt, completions, client="", temperature=1.0) -> Future:
        return self.scorer.submit(LogprobsRequest.of(prompt, completions, temperature), client)

    def go(self) -> None:
        self._go.set()
        self.first.result(30)

    def fed(self) -> list[list[int]]:
        """Token ids of each pass after the first one."""
        return [ids.flatten().tolist() for ids in self.passes[1:]]

    @torch.no_grad()
    def exact(self, prompt, completions, temperature=1.0) -> np.ndarray:
        """One padded sequence at a time, by a model of the same weights without the hook."""
        alone = Batcher(0, longest_packed=0)
        rows = [token_logprobs(self.plain, alone.make([(prompt, one)], "cpu"), temperature)[0] for one in completions]
        return torch.cat(rows).numpy()


def close_to(answer: Future, exact: np.ndarray) -> bool:
    return np.allclose(answer.result(30), exact, atol=1e-5, rtol=0)


def test_what_waits_shares_a_pass_and_equal_prompts_are_fed_once():
    desk = Desk(budget=100)
    asked = [([5, 6, 7], [[8, 9]], "a"), ([10, 11], [[12, 13, 14]], "b"), ([5, 6, 7], [[15, 16], [17, 18]], "c")]
    answers = [desk.ask(*one) for one in asked]
    desk.go()
    answers[-1].result(30)
    # The last token of a completion predicts nothing and is not fed.
    assert desk.fed() == [[5, 6, 7, 8, 15, 17, 10, 11, 12, 13]]
    for answer, (prompt, completions, _) in zip(answers, asked, strict=True):
        assert close_to(answer, desk.exact(prompt, completions))


def test_clients_take_turns_however_much_one_of_them_has_queued():
    desk = Desk(budget=20)
    greedy = [desk.ask([20 + number], [[1, 2, 3], [4, 5, 6]], "greedy") for number in range(6)]  # 7 tokens each
    modest = [desk.ask([40 + number], [[1, 2, 3], [4, 5, 6]], "modest") for number in range(2)]
    desk.go()
    for answer in greedy + modest:
        answer.result(30)
    firsts = [[row[place] for place in (0, 5)] for row in desk.fed()]
    assert firsts == [[20, 40], [21, 41], [22, 23], [24, 25]]


def test_a_prompt_that_waits_elsewhere_comes_along_before_its_turn():
    desk = Desk(budget=12)
    answers = [desk.ask([20, 21, 22], [[1, 2, 3]], "a"), desk.ask([30], [[1] * 8], "a")]
    answers += [desk.ask([40], [[1] * 8], "b"), desk.ask([20, 21, 22], [[4, 5, 6]], "b")]
    desk.go()
    for answer in answers:
        answer.result(30)
    assert desk.fed()[0] == [20, 21, 22, 1, 2, 4, 5]
    assert [row[0] for row in desk.fed()[1:]] == [40, 30]


def test_a_large_request_is_spread_over_passes_and_a_small_one_need_not_wait_for_its_end():
    desk = Desk(budget=30)
    large = [[number] * 9 for number in range(1, 21)]
    answer, order = desk.ask([50, 51], large, "large"), []
    answer.add_done_callback(lambda _: order.append("large"))
    small = desk.ask([52], [[1, 2]], "small")
    small.add_done_callback(lambda _: order.append("small"))
    desk.go()
    assert close_to(answer, desk.exact([50, 51], large)) and close_to(small, desk.exact([52], [[1, 2]]))
    assert order == ["small", "large"]
    assert all(len(row) <= 30 for row in desk.fed())
    assert sum(row.count(50) for row in desk.fed()) == 7  # three completions a pass


def test_temperatures_are_not_mixed():
    desk = Desk(budget=100)
    warm = [desk.ask([5], [[6, 7]], "a", 2.0), desk.ask([8], [[9, 10]], "b", 2.0)]
    cold = desk.ask([5], [[6, 7]], "c", 0.5)
    desk.go()
    assert close_to(warm[0], desk.exact([5], [[6, 7]], 2.0)) and close_to(warm[1], desk.exact([8], [[9, 10]], 2.0))
    assert close_to(cold, desk.exact([5], [[6, 7]], 0.5))


@pytest.mark.parametrize("config", ["qwen2", "bloom, alibi"])
def test_out_of_memory_halves_the_budget_for_good_and_is_said_once_a_halving(config, caplog):
    desk = Desk(budget=64, config=config, fits=20)
    asked = [([number], [[number + 1] * 8]) for number in range(10, 18)]  # 8 tokens fed each
    answers = [desk.ask(*one, client=str(one[0])) for one in asked]
    desk.go()
    for answer in answers:
        answer.result(30)
    warnings = [record.getMessage() for record in caplog.records if record.name == "grpo.scorer"]
    assert warnings == [
        f"out of memory: batches of {budget} tokens from now on (--max_batch_tokens)" for budget in (32, 16)
    ]
    before = len(desk.passes)
    again = [desk.ask(*one, client=str(one[0])) for one in asked]
    for answer, one in zip(answers + again, asked + asked, strict=True):
        assert close_to(answer, desk.exact(*one))
    assert all(ids.numel() <= 20 for ids in desk.passes[before:])
    assert not desk.dead


def test_a_sequence_that_does_not_fit_alone_is_its_requests_507_and_nobody_elses():
    desk = Desk(budget=64, fits=20)
    huge = desk.ask([5], [[6] * 30, [7] * 2], "huge")
    small = desk.ask([8], [[9, 10]], "small")
    desk.go()
    assert close_to(small, desk.exact([8], [[9, 10]]))
    with pytest.raises(ProtocolError, match="a sequence of 31 tokens does not fit the memory") as refusal:
        huge.result(30)
    assert (refusal.value.status, refusal.value.code) == (507, "out_of_memory")
    assert close_to(desk.ask([5], [[7] * 2]), desk.exact([5], [[7] * 2]))
    assert desk.scorer.queue_depth == 0


@pytest.mark.parametrize("error", [ValueError, RuntimeError, NotImplementedError])
def test_a_request_that_fails_in_a_shared_pass_fails_alone(error):
    """Torch's errors are RuntimeErrors of many kinds; only those that speak of memory are about memory."""
    desk = Desk(budget=100, poison=33, error=error)
    good, bad, other = (desk.ask([token], [[1, 2]], str(token)) for token in (5, 33, 6))
    desk.go()
    with pytest.raises(ProtocolError, match="token 33 hurts") as refusal:
        bad.result(30)
    assert refusal.value.status == 500
    assert close_to(good, desk.exact([5], [[1, 2]])) and close_to(other, desk.exact([6], [[1, 2]]))
    assert not desk.dead


def test_a_worker_that_can_score_nothing_dies_and_answers_everyone():
    desk = Desk(budget=10)
    waiting = [desk.ask([token], [[1, 2] * 4], str(token)) for token in range(5)]
    torch.nn.init.constant_(desk.model.get_output_embeddings().weight, float("nan"))
    desk._go.set()
    for answer in [desk.first, *waiting]:
        with pytest.raises(ProtocolError, match="died|not finite"):
            answer.result(30)
    desk.scorer.close()
    assert isinstance(desk.dead[0], ArithmeticError) and len(desk.dead) == 1
    with pytest.raises(ProtocolError, match="stopping"):
        desk.ask([1], [[2]])
