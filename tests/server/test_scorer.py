"""The scorer: its batches, their order, and its answer to a failed pass. The model is real; a hook before its
body holds a pass back until the queue is as the test wants it, notes what is fed, and breaks what should break."""

import gc
import threading
import weakref
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from models import CONFIGS, build
from rounding import assert_rounded

from grpo.model.logprobs import token_logprobs
from grpo.model.packing import Batcher
from grpo.model.trial import make_batcher
from grpo.server.fair_queue import FairQueue
from grpo.server.monitor import Pass
from grpo.server.scorer import Scorer
from grpo.wire.logprobs import LogprobsRequest
from grpo.wire.refusals import ProtocolError


class Desk:
    """A scorer whose first pass waits until `go`, with the rows that each later pass fed."""

    def __init__(self, budget: int, config="qwen2", fits=10**9, poison: int | None = None, error=ValueError, **limits):
        self.model, self.plain = build(CONFIGS[config]), build(CONFIGS[config])
        self.batcher = make_batcher(self.model, 0)
        self.passes: list[torch.Tensor] = []
        self.dead: list[Exception] = []
        self._busy, self._go = threading.Event(), threading.Event()
        self._fits, self._poison, self._error = fits, poison, error
        self.model.base_model.register_forward_pre_hook(self._before, with_kwargs=True)
        self.notes: list[Pass] = []
        self.queue = FairQueue(self.batcher, budget=budget, **{"max_tokens": 10**6, "max_requests": 1000} | limits)
        self.scorer = Scorer(self.queue, self.model, self.batcher, on_death=self.dead.append, on_pass=self.notes.append)
        self.first = self.ask([63], [[62]])
        assert self._busy.wait(30)

    def _before(self, module, positional, options):
        self._busy.set()
        assert self._go.wait(30)
        ids = options["input_ids"]
        self.passes.append(ids)
        if ids.numel() > self._fits:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        if self._poison is not None and (ids == self._poison).any():
            raise self._error(f"token {self._poison} hurts")

    def ask(self, prompt, completions, client="", temperature=1.0) -> Future:
        return self.queue.submit(LogprobsRequest.of(prompt, completions, temperature), client)

    def release(self) -> None:
        self._go.set()

    def go(self, *answers: Future) -> None:
        """Let all passes go, and wait for these answers."""
        self.release()
        for answer in (self.first, *answers):
            answer.result(30)

    def fed(self) -> list[list[int]]:
        """Token ids of each pass after the first one."""
        return [ids.flatten().tolist() for ids in self.passes[1:]]

    @torch.no_grad()
    def exact(self, prompt, completions, temperature=1.0) -> np.ndarray:
        """One padded sequence at a time, by a model of the same weights without the hook."""
        alone = Batcher(0, packs=False)
        batches = [alone.make([(prompt, completion)], "cpu") for completion in completions]
        return torch.cat([token_logprobs(self.plain, batch, temperature)[0] for batch in batches]).numpy()


def check(answer: Future, exact: np.ndarray) -> None:
    assert_rounded(answer.result(30).values, exact)


def test_what_waits_shares_a_pass_and_equal_prompts_are_fed_once():
    desk = Desk(budget=100)
    requests = [([5, 6, 7], [[8, 9]], "a"), ([10, 11], [[12, 13, 14]], "b"), ([5, 6, 7], [[15, 16], [17, 18]], "c")]
    answers = [desk.ask(*request) for request in requests]
    desk.go(*answers)
    # The last token of a completion predicts nothing and is not fed.
    assert desk.fed() == [[5, 6, 7, 8, 15, 17, 10, 11, 12, 13]]
    for answer, (prompt, completions, _) in zip(answers, requests, strict=True):
        check(answer, desk.exact(prompt, completions))


def test_clients_take_turns_however_much_one_of_them_has_queued():
    desk = Desk(budget=20)
    greedy = [desk.ask([20 + number], [[1, 2, 3], [4, 5, 6]], "greedy") for number in range(6)]  # 7 tokens each
    modest = [desk.ask([40 + number], [[1, 2, 3], [4, 5, 6]], "modest") for number in range(2)]
    desk.go(*greedy, *modest)
    firsts = [[row[place] for place in (0, 5)] for row in desk.fed()]
    assert firsts == [[20, 40], [21, 41], [22, 23], [24, 25]]


def test_a_client_whose_rows_do_not_fit_beside_another_s_keeps_its_turn():
    desk = Desk(budget=20)
    greedy = [desk.ask([20 + number], [[1] * 6, [2] * 6], "greedy") for number in range(6)]  # 13 tokens each
    large = desk.ask([40], [[3] * 9] * 3, "large")  # 28 tokens, above the budget; one completion has 10
    desk.go(*greedy, large)
    assert [row[0] for row in desk.fed()] == [20, 40, 21, 40, 22, 23, 24, 25]


def test_a_large_request_is_spread_over_passes_and_a_small_one_need_not_wait_for_its_end():
    desk = Desk(budget=30)
    large = [[number] * 9 for number in range(1, 21)]
    answer, order = desk.ask([50, 51], large, "large"), []
    answer.add_done_callback(lambda _: order.append("large"))
    small = desk.ask([52], [[1, 2]], "small")
    small.add_done_callback(lambda _: order.append("small"))
    desk.go()
    check(answer, desk.exact([50, 51], large))
    check(small, desk.exact([52], [[1, 2]]))
    assert order == ["small", "large"]
    assert all(len(row) <= 30 for row in desk.fed())
    assert sum(row.count(50) for row in desk.fed()) == 7  # three completions a pass


def test_temperatures_are_not_mixed():
    desk = Desk(budget=100)
    warm = [desk.ask([5], [[6, 7]], "a", 2.0), desk.ask([8], [[9, 10]], "b", 2.0)]
    cold = desk.ask([5], [[6, 7]], "c", 0.5)
    desk.go()
    check(warm[0], desk.exact([5], [[6, 7]], 2.0))
    check(warm[1], desk.exact([8], [[9, 10]], 2.0))
    check(cold, desk.exact([5], [[6, 7]], 0.5))


def refused(desk, prompt, completions, client) -> None:
    with pytest.raises(ProtocolError) as refusal:
        desk.ask(prompt, completions, client)
    assert (refusal.value.status, refusal.value.code, refusal.value.retry_after) == (503, "busy", 2)


def test_a_client_may_hold_as_many_tokens_as_stay_free_and_a_newcomer_finds_room():
    desk = Desk(budget=100, max_tokens=100)  # 2 tokens are in the held pass, another client's
    answers = [desk.ask([5], [[6] * 48], "a")]  # 49 of its own, 49 free
    refused(desk, [7], [[]], "a")
    answers.append(desk.ask([7], [[8] * 23], "b"))  # 24 of its own, 25 free
    refused(desk, [7], [[]], "b")
    answers.append(desk.ask([9], [[1] * 11], "c"))
    assert desk.queue.held() == {"": (2, 1), "a": (49, 1), "b": (24, 1), "c": (12, 1)}
    desk.go(*answers)
    assert desk.queue.held() == {}
    desk.ask([5], [[6] * 49], "a").result(30)  # half of the queue when alone
    refused(desk, [5], [[6] * 50], "a")


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_answered_request_is_not_kept_until_the_garbage_collector_comes(deterministic):
    """It comes rarely to what has lived for seconds, and each request holds its body."""
    desk = Desk(budget=100, deterministic=deterministic)
    desk.go()
    gc.disable()
    try:
        request = LogprobsRequest.of([5, 6], [[7] * 9, [8]], 1.0)
        body = weakref.ref(request.input_ids)
        desk.queue.submit(request).result(30)
        del request
        desk.ask([9], [[10]]).result(30)  # until then the scorer has the last pass in its hand
        assert body() is None
    finally:
        gc.enable()


def test_deterministic_answers_are_the_same_bits_whatever_else_waits():
    requests = [([5, 6, 7], [[8] * n for n in (9, 30, 2, 17)]), ([5, 6, 7], [[9] * 12]), ([10] * 20, [[11, 12]])]
    quiet = Desk(budget=40, deterministic=True)
    quiet.go()
    alone = [quiet.ask(*request).result(30) for request in requests]

    busy = Desk(budget=40, deterministic=True)
    waiting = [busy.ask([5, 6, 7], [[8] * 5, [20] * 8], f"other {n}") for n in range(5)]
    answers = [busy.ask(*request, client=f"client {n % 2}") for n, request in enumerate(requests)]
    waiting += [busy.ask([5, 6, 7], [[8] * 30], "client 0")]
    busy.go()
    for answer, expected, request in zip(answers, alone, requests, strict=True):
        assert answer.result(30).values.tobytes() == expected.values.tobytes()
        check(answer, busy.exact(*request))
    for answer in waiting:
        answer.result(30)
    assert all(ids.numel() <= 40 for ids in busy.passes)
    assert len(busy.fed()) == len(waiting) + len(quiet.fed())  # no pass is shared

    together = LogprobsRequest.joined([LogprobsRequest.of(*request, 1.0) for request in (requests[2], requests[0])])
    values = busy.queue.submit(together).result(30).values
    assert values.tobytes() == alone[2].values.tobytes() + alone[0].values.tobytes()


def test_deterministic_clients_take_turns():
    desk = Desk(budget=20, deterministic=True)
    greedy = [desk.ask([20 + number], [[1] * 15, [2] * 15], "greedy") for number in range(3)]  # two passes each
    modest = desk.ask([40], [[1, 2, 3]], "modest")
    desk.go(*greedy, modest)
    assert [row[0] for row in desk.fed()] == [20, 40, 20, 21, 21, 22, 22]


@pytest.mark.parametrize(
    "requests, tokens, padded, fed",
    [
        # Without the last of each: 4, 6 and 2 tokens; padded to 6; the first prompt stands once.
        ([([5, 6, 7], [[8, 9], [8, 9, 10, 11]]), ([10], [[12, 13]])], 12, 18, 9),
        ([([1, 2, 3, 4], [[], [5]])], 8, 8, 4),
    ],
)
def test_a_pass_is_noted_with_what_packing_and_sharing_saved(requests, tokens, padded, fed):
    desk = Desk(budget=100)
    desk.go(*[desk.ask(*request, client=str(request)) for request in requests])
    note = desk.notes[-1]
    assert (note.tokens, note.padded, note.fed, note.budget) == (tokens, padded, fed, 100)
    assert (note.saved_by_packing, note.saved_by_sharing) == (padded - tokens, tokens - fed)
    assert note.seconds > 0


@pytest.mark.parametrize("config", ["qwen2", "bloom, alibi"])
def test_out_of_memory_halves_the_budget_for_good_and_is_said_once_a_halving(config, caplog):
    desk = Desk(budget=64, config=config, fits=20)
    requests = [([number], [[number + 1] * 8]) for number in range(10, 18)]  # 8 tokens fed each
    answers = [desk.ask(*request, client=str(request[0])) for request in requests]
    desk.go(*answers)
    warnings = [record.getMessage() for record in caplog.records if record.name == "grpo.server.scorer"]
    said = "out of memory: batches of {} tokens from now on (--max_batch_tokens)"
    assert warnings == [said.format(budget) for budget in (32, 16)]
    before = len(desk.passes)
    again = [desk.ask(*request, client=str(request[0])) for request in requests]
    for answer, request in zip(answers + again, requests + requests, strict=True):
        check(answer, desk.exact(*request))
    assert all(ids.numel() <= 20 for ids in desk.passes[before:])
    assert not desk.dead


def test_a_sequence_that_does_not_fit_alone_is_its_requests_507_and_nobody_elses():
    desk = Desk(budget=64, fits=20)
    huge = desk.ask([5], [[6] * 30, [7] * 2], "huge")
    small = desk.ask([8], [[9, 10]], "small")
    desk.go()
    check(small, desk.exact([8], [[9, 10]]))
    with pytest.raises(ProtocolError, match="a sequence of 31 tokens does not fit the memory") as refusal:
        huge.result(30)
    assert (refusal.value.status, refusal.value.code) == (507, "out_of_memory")
    check(desk.ask([5], [[7] * 2]), desk.exact([5], [[7] * 2]))
    assert desk.queue.held() == {} and not desk.dead


@pytest.mark.parametrize("error", [ValueError, RuntimeError, NotImplementedError])
def test_a_request_that_fails_in_a_shared_pass_fails_alone(error):
    """Torch's errors are RuntimeErrors of many kinds; only those that speak of memory are about memory."""
    desk = Desk(budget=100, poison=33, error=error)
    good, bad, second = (desk.ask([token], [[1, 2]], str(token)) for token in (5, 33, 6))
    desk.go()
    with pytest.raises(ProtocolError, match="token 33 hurts") as refusal:
        bad.result(30)
    assert refusal.value.status == 500
    check(good, desk.exact([5], [[1, 2]]))
    check(second, desk.exact([6], [[1, 2]]))
    assert not desk.dead


GONE = ProtocolError(499, "client_gone", "gone")


def test_a_cancelled_request_that_waits_is_not_computed_and_its_room_is_free():
    desk = Desk(budget=100, max_tokens=100)
    lost = desk.ask([5], [[6] * 48], "a")
    refused(desk, [7], [[8] * 30], "b")
    desk.queue.cancel(lost, GONE)
    assert desk.queue.held() == {"": (2, 1)}
    kept = desk.ask([7], [[8] * 30], "b")
    desk.go()
    check(kept, desk.exact([7], [[8] * 30]))
    assert desk.fed() == [[7] + [8] * 29]
    desk.queue.cancel(kept, GONE)  # too late: nothing happens
    assert desk.queue.held() == {}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("exchange", [False, True])
def test_of_a_cancelled_request_only_the_pass_that_has_begun_is_finished(deterministic, exchange):
    limits = {"budget": 20, "max_tokens": 1000, "max_requests": 100}
    queue = FairQueue(Batcher(0, packs=False), **limits, deterministic=deterministic)
    lost = queue.submit(LogprobsRequest.of([5, 6], [[7] * 8] * 6, 1.0), "a")
    begun = queue.take()
    assert 0 < len(begun) < 6
    later = []
    if exchange:
        queue.exchange(lambda: None, print, "new")
        later = [queue.submit(LogprobsRequest.of([8], [[9]], 1.0), "a")]
    queue.cancel(lost, GONE)
    if exchange:
        queue.cancel(later[0], GONE)
    assert queue.held() == {"a": (10 * len(begun), 1)}
    queue.settle(begun)
    assert queue.held() == {}
    with pytest.raises(ProtocolError, match="gone"):
        lost.result(0)
    if exchange:
        queue.take()
        queue.finish_exchange(None)
    queue.submit(LogprobsRequest.of([1], [[2]], 1.0), "b")
    [(job, row)] = queue.take()
    assert (job.client, row) == ("b", 0)
    queue.cancel(job.future, GONE)
    queue.settle([(job, row)])
    queue.close()
    assert queue.take() is None and queue.held() == {}


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_exchange_waits_for_what_came_before_and_what_comes_later_waits_for_it(deterministic):
    """Both come in several passes, from the same clients."""
    desk = Desk(budget=12, deterministic=deterministic)
    long = [[number] * 9 for number in range(1, 5)]
    before = [desk.ask([50, 51], long, "a"), desk.ask([52], long, "b")]
    expected = [desk.exact([50, 51], long), desk.exact([52], long)]

    @torch.no_grad()
    def action():
        assert all(answer.done() for answer in before)
        for model in (desk.model, desk.plain):
            for tensor in model.parameters():
                tensor.mul_(1.1)

    exchanged = desk.queue.exchange(action, print, "new")
    after = [desk.ask([50, 51], long, "a"), desk.ask([53], long, "c")]
    assert desk.queue.held()["a"] == (2 * 44, 2)
    desk.go()
    exchanged.result(30)
    for answer, exact in zip(before, expected, strict=True):
        check(answer, exact)
    for answer, prompt in zip(after, ([50, 51], [53]), strict=True):
        exact = desk.exact(prompt, long)
        check(answer, exact)
        assert np.abs(exact[:9] - expected[0][:9]).max() > 1e-3
    desk.queue.exchange(lambda: None, print, "new").result(30)  # also where nothing waits, and again
    desk.scorer.close()
    with pytest.raises(ProtocolError, match="stopping"):
        desk.queue.exchange(lambda: None, print, "new")


def test_an_exchange_that_fails_ends_the_worker_and_answers_everyone():
    desk = Desk(budget=10)
    before = desk.ask([5], [[6] * 8])

    def action():
        raise OSError("half way")

    exchanged, after = desk.queue.exchange(action, print, "new"), desk.ask([5], [[6] * 8])
    desk.go()
    check(before, desk.exact([5], [[6] * 8]))
    for lost in (exchanged, after):
        with pytest.raises(ProtocolError, match="died"):
            lost.result(30)
    desk.scorer.close()
    assert [str(death) for death in desk.dead] == ["half way"]


def test_a_worker_that_can_score_nothing_dies_and_answers_everyone():
    desk = Desk(budget=10)
    waiting = [desk.ask([token], [[1, 2] * 4], str(token)) for token in range(5)]
    torch.nn.init.constant_(desk.model.get_output_embeddings().weight, float("nan"))
    desk.release()
    for answer in [desk.first, *waiting]:
        with pytest.raises(ProtocolError, match="died|not finite"):
            answer.result(30)
    desk.scorer.close()
    assert isinstance(desk.dead[0], ArithmeticError) and len(desk.dead) == 1
    with pytest.raises(ProtocolError, match="stopping"):
        desk.ask([1], [[2]])
