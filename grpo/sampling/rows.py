"""The rows of a decode loop: their tokens, and the forward passes that draw more, on the model's device.

A row is a completion, of any number of segments. The first `drawing` rows draw a token in each step. The others are
free, or wait for the answer to a segment: they keep their tokens. The host knows the rows as far as it has looked.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.model.logprobs import Head, body_of, text_at
from grpo.model.packing import Ids, pack_prompts
from grpo.model.pictures import Vision
from grpo.model.shared_cache import Fed, Shape, SharedCache, Step
from grpo.model.token_pass import TokenPass, is_known
from grpo.sampling.draw import draw
from grpo.wire.picture_files import PicturedPrompt


class StepGraphs:
    """Steps of the decode loop as CUDA graphs, one for each shape: the hundreds of kernels of a forward pass in one
    launch. On other devices each step is a plain call."""

    def __init__(self, device: torch.device, refuse_waits: bool = False):
        """With `refuse_waits`, for the trial, raise RuntimeError if the host waits for the device in a shape's first
        step, in whatever thread: a recording would spoil torch's allocator."""
        self._device, self._refuse_waits = device, refuse_waits
        self.forget()

    def forget(self) -> None:
        """Drop all graphs: tensors that they read have moved."""
        self._graphs: dict[Shape, torch.cuda.CUDAGraph | None] = {}
        # A pool whose graphs have all gone takes no new ones.
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def run(self, step: Callable[[Shape], None], shape: Shape) -> None:
        """Do the step: the first time plainly, which loads all it needs, the second time recorded, then replayed."""
        if self._device.type != "cuda":
            step(shape)
        elif shape not in self._graphs:
            with _waits_refused() if self._refuse_waits else nullcontext():
                step(shape)
            self._graphs[shape] = None
        else:
            if (graph := self._graphs[shape]) is None:
                graph, mode = torch.cuda.CUDAGraph(), "thread_local"  # NCCL's watchdog may call CUDA meanwhile
                with torch.cuda.device(self._device), torch.cuda.graph(graph, self._pool, capture_error_mode=mode):
                    step(shape)
                self._graphs[shape] = graph
            graph.replay()


@contextmanager
def _waits_refused() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


PREFILL_TOKENS = 8192  # of the prompts or answers of one forward pass, or one longer one
# The state of a row: its prompt's slot in the cache, its number among the prompt's completions, the prompt's tokens,
# the position of its first own token, its last token, that one's place among its own, and how many a step adds.
SLOT, COPY, PROMPT, BASE, TOKEN, PLACE, ADDED = range(7)
Cell = tuple[int, int, int, int]  # the state of a row up to BASE


def slots(prompts: int, rows: int, copies: int) -> int:
    """Return how many prompts the cache holds at a time: twice as many as fill the rows at once, as a prompt keeps its
    slot until its longest completion ends."""
    return min(prompts, 2 * -(-rows // copies) if copies > 1 else rows)


class Rows:
    """The rows of one call: `count` completions at a time, of up to `slots` prompts."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int,
        slots: int,
        copies: int,
        longest_prompt: int,
        longest: int,
        temperature: float,
        is_greedy: bool,
        has_scales: bool = False,
        ends: list[int],
        graphs: StepGraphs | None,
        fused: bool = False,
        vision: Vision | None,
    ):
        """`rows`: completions at a time; `slots`: prompts at a time, of up to `copies` rows each. `longest_prompt`:
        tokens of a prompt that there is room for at first; `longest`: most of a completion. `has_scales`: logits are
        multiplied by a number of each row's. `ends` end a segment. `fused`: by the kernels of grpo/kernels."""
        self._model, self._vision, self._graphs = model, vision, graphs
        self._body, self._head, self._device = body_of(model), Head.of(model, temperature), model.device
        self.count, self.slots = rows, slots
        self._copies, self._longest = copies, longest
        self._ends = np.zeros(len(self._head.weight), bool)
        self._ends[[token for token in ends if token < len(self._ends)]] = True
        self._cache = SharedCache(
            rows=rows,
            slots=slots,
            copies=copies,
            longest_prompt=longest_prompt,
            longest_completion=longest,
        )
        self._choose_pass(fused, positions=longest_prompt + longest)
        self.drawing = 0  # how many rows draw: the first ones
        self._in_cache = rows  # how many rows the cache has: those behind them are free for good
        self.ids, self.logprobs = np.zeros((rows, longest), np.int64), np.zeros((rows, longest), np.float32)
        """each row's tokens and log-probs, up to its PLACE"""
        self.state = np.zeros((7, rows), np.int64)  # the state of each row; 0 in a free row
        self._unseen: list[tuple[Tensor, Tensor]] = []
        """tokens and log-probs of the rows in each step since the host has looked"""
        # A step reads and writes these.
        self._state = torch.zeros(7, rows, dtype=torch.int64, device=self._device)
        self._last_logprobs = torch.zeros(rows, device=self._device)
        # Of each slot and number in the group: the row, and the random numbers.
        self._rows_of = torch.zeros(slots, copies, dtype=torch.int64, device=self._device)
        self._numbers = None
        if not is_greedy:
            self._numbers = torch.zeros(slots, copies, longest, dtype=torch.float64, device=self._device)
        self._scales = torch.ones(slots, copies, device=self._device) if has_scales else None
        # transformers passes a mask in four dimensions unchanged; without one it would build one.
        self._any_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device)

    def _choose_pass(self, fused: bool, positions: int) -> None:
        """Choose how a step computes hidden states, logits and tokens; every position is less than `positions`."""
        self._token_pass, self._logits, self._draw_tokens = None, self._head.logits_in_blocks, draw
        if fused:
            # These need Triton, which not every build of torch has.
            from grpo.kernels.drawing import draw as draw_fused
            from grpo.kernels.fused_pass import FusedPass

            self._token_pass = FusedPass(self._body, self._cache, positions)
            self._logits, self._draw_tokens = partial(self._head.logits, tokens=slice(None)), draw_fused
        elif is_known(self._body):
            self._token_pass = TokenPass(self._body, self._cache, positions)

    def prefill(self, by_slot: dict[int, Ids]) -> list[Tensor]:
        """Compute the keys and values of prompts, for their slots; return each one's last hidden state."""
        slots, prompts, hidden = [*by_slot], [*by_slot.values()], []
        if self._cache.make_prompt_room(max(map(len, prompts), default=0)) and self._graphs is not None:
            self._graphs.forget()
        for part in _parts([len(prompt) for prompt in prompts]):
            lengths = [len(prompt) for prompt in prompts[part]]
            self._cache.fill(slots[part], lengths)
            batch = pack_prompts(prompts[part], self._vision, self._device)
            with text_at(self._model, batch.input_ids, batch.not_pieces) as ids:
                states = self._forward(ids, batch.position_ids, tree=batch.tree, **batch.pictures)[0]
            hidden += [states[end - 1].clone() for end in accumulate(lengths)]
        return hidden

    def copy_prompt(self, slot: int, to: list[int], length: int) -> None:
        """Copy the keys and values of a prompt of so many tokens to other slots."""
        self._cache.copy_prompt(slot, to, length)

    def base(self, prompt: Ids) -> int:
        """Return the position of the first token that follows a prompt."""
        return self._vision.first_position(prompt) if isinstance(prompt, PicturedPrompt) else len(prompt)

    def begin(
        self,
        rows: list[int],
        cells: list[Cell],
        hidden: list[Tensor],
        numbers: list[np.ndarray] | None,
        scales: list[float] | None = None,
    ) -> None:
        """Draw the first token of completions in these rows, which were free. `hidden`: each prompt's last hidden
        state. `numbers`: its random numbers, float64 [up to longest], as many of each. `scales`: of its logits."""
        self.state[:TOKEN, rows], self.state[TOKEN:, rows] = np.transpose(cells), 0
        if numbers is not None:
            slots, copies = torch.from_numpy(self.state[:PROMPT, rows]).to(self._device)
            stacked = torch.from_numpy(np.stack(numbers)).to(self._device)
            self._numbers[slots, copies, : stacked.shape[1]] = stacked
        self._set_scales(rows, scales)
        self._draw_next(rows, hidden)

    def cut(self, row: int, length: int) -> None:
        """Keep the first `length` tokens of a row."""
        self.state[PLACE, row], self.state[TOKEN, row] = length - 1, self.ids[row, length - 1]

    def _set_scales(self, rows: list[int], scales: list[float] | None) -> None:
        if self._scales is not None and scales is not None:
            slots, copies = torch.from_numpy(self.state[:PROMPT, rows]).to(self._device)
            self._scales[slots, copies] = torch.tensor(scales, device=self._device)

    def feed(
        self,
        answers: dict[int, list[int]],
        numbers: dict[int, np.ndarray] | None = None,
        scales: list[float] | None = None,
    ) -> None:
        """Let an answer follow the tokens of each of these rows, and draw the token after it. `numbers`: the random
        numbers from there on, float64 [any]; without them those of the row's begin continue. `scales`: of logits."""
        rows, lengths = [*answers], [1 + len(answer) for answer in answers.values()]  # a row's last token was not fed
        self._make_room((self.state[PLACE, rows] + lengths).max())
        hidden: list[Tensor] = []
        for part in _parts(lengths):
            fed, ids, positions = [], [], []
            for row, length in zip(rows[part], lengths[part], strict=True):
                slot, _, prompt, base, token, place, _ = self.state[:, row].tolist()
                fed.append(Fed(row=row, slot=slot, prompt=prompt, place=place, count=length))
                ids += [token, *answers[row]]
                positions += range(base + place, base + place + length)
                self.ids[row, place + 1 : place + length] = answers[row]
                self.logprobs[row, place + 1 : place + length] = np.nan
                self.state[PLACE, row] = place + length
            self._cache.fed = fed
            ids, positions = (torch.tensor([values]).to(self._device) for values in (ids, positions))
            states = self._forward(ids, positions)[0]
            hidden += [states[end - 1].clone() for end in accumulate(lengths[part])]
        for row, values in (numbers or {}).items():
            slot, copy, place = self.state[[SLOT, COPY, PLACE], row].tolist()
            self._numbers[slot, copy, place : place + len(values)] = torch.from_numpy(values).to(self._device)
        self._set_scales(rows, scales)
        self._draw_next(rows, hidden)

    def _draw_next(self, rows: list[int], hidden: list[Tensor]) -> None:
        """Draw the token at the PLACE of each of these rows."""
        slots, copies, places = torch.from_numpy(self.state[[SLOT, COPY, PLACE]][:, rows]).to(self._device)
        tokens, logprobs = self._draw(torch.stack(hidden), slots, copies, places)
        places = self.state[PLACE, rows]
        self.ids[rows, places], self.logprobs[rows, places] = tokens.cpu().numpy(), logprobs.cpu().numpy()
        self.state[TOKEN, rows] = self.ids[rows, places]

    def free(self, row: int) -> None:
        self.state[:, row] = 0

    def move(self, rows: list[int], to: list[int]) -> None:
        """Move rows to others at once, so that two may change places. Those that nothing moves to are free then."""
        if not rows:
            return
        self._cache.move(rows, to, self.state[PLACE, rows].max())
        for values in (self.ids.T, self.logprobs.T, self.state):
            values[:, to] = values[:, rows]
        self.state[:, [row for row in rows if row not in to]] = 0

    def bring_forward(self, held: list, draws: list[bool], free_for_good: bool) -> None:
        """Let the last rows that draw change places with the first ones that do not, also in `held`: what each row has,
        None for a free one. `draws`: which of the rows draw. Then do as `arrange`."""
        drawing = sum(draws)
        moved = [row for row in range(drawing, len(draws)) if draws[row]]
        to = [row for row in range(drawing) if not draws[row]]
        back = [(there, here) for here, there in zip(moved, to, strict=True) if held[there] is not None]
        moves = [*zip(moved, to, strict=True), *back]
        self.move([row for row, _ in moves], [row for _, row in moves])
        for here, there in zip(moved, to, strict=True):
            held[here], held[there] = held[there], held[here]
        self.arrange(drawing, free_for_good=free_for_good)

    def arrange(self, drawing: int, free_for_good: bool) -> None:
        """Let so many rows draw, the first ones, and tell the device. `free_for_good`: nothing begins any more in free
        rows, so the cache need not grow for the last of them."""
        self.drawing = drawing
        if free_for_good and (used := int(self.state[PROMPT].nonzero()[0].max(initial=-1)) + 1):
            self._in_cache = min(1 << (used - 1).bit_length(), self._in_cache)
        self.state[ADDED] = np.arange(self.count) < drawing
        rows_of, first = np.zeros((self.slots, self._copies), np.int64), self.state[:, :drawing]
        # Not of rows that wait: a step may compute fewer rows than there are.
        rows_of[first[SLOT], first[COPY]] = range(drawing)
        self._rows_of.copy_(torch.from_numpy(rows_of))
        self._state.copy_(torch.from_numpy(self.state))

    def steps(self, count: int) -> int:
        """Draw `count` tokens in each row that draws, fewer if one reaches its longest length. Return how many."""
        rows = self.drawing
        slots, _, prompt, _, _, place, _ = self.state[:, :rows].max(axis=1).tolist()
        end = min(place + 1 + count, self._longest)
        # A step of a graph's shape may compute rows that wait too: it keeps some token's keys at their last place,
        # whose own are only kept when the answer is fed.
        self._make_room(max(end - 1, self.state[PLACE].max() + 1))
        for own in range(place + 1, end):
            if self._graphs is None:
                self._step(Shape(rows=rows, slots=slots + 1, prompt=prompt, own=own))
            else:
                self._graphs.run(self._step, self._bucket(rows))
            self._unseen.append((self._state[TOKEN, :rows].clone(), self._last_logprobs[:rows].clone()))
        return end - 1 - place

    def look(self) -> list[int]:
        """Wait for the device; return the rows whose segment has ended, with its last token as theirs."""
        rows = self.drawing
        state, tokens = self.state[:, :rows], self.state[TOKEN, :rows][None]
        if self._unseen:
            drawn, logprobs = (torch.stack(steps).cpu().numpy() for steps in zip(*self._unseen, strict=True))
            self._unseen.clear()
            places = state[PLACE] + 1 + np.arange(len(drawn)).reshape(-1, 1)
            self.ids[np.arange(rows), places], self.logprobs[np.arange(rows), places] = drawn, logprobs
            tokens = np.concatenate([tokens, drawn])
        ends = self._ends[tokens]
        ended = ends.any(axis=0)
        last = np.where(ended, ends.argmax(axis=0), len(tokens) - 1)
        state[TOKEN], state[PLACE] = tokens[last, np.arange(rows)], state[PLACE] + last
        return (ended | (state[PLACE] == self._longest - 1)).nonzero()[0].tolist()

    def _make_room(self, tokens: int) -> None:
        if self._cache.make_room(int(tokens), self._in_cache) and self._graphs is not None:
            self._graphs.forget()

    def _bucket(self, rows: int) -> Shape:
        """Return sizes that the rows fit, of which a call has few: powers of two of rows, and the cache's room, each
        GROW times the one before. With 64 rows and 1,000 tokens that is 7 and 8, and seldom all pairs of them."""
        rows = min(1 << (rows - 1).bit_length(), self._in_cache)
        return Shape(rows=rows, slots=self.slots, prompt=self._cache.prompt_room, own=self._cache.room)

    def _step(self, shape: Shape) -> None:
        """Feed each row's last token and draw its next one."""
        slots, copies, prompts, bases, tokens, places, added = state = self._state[:, : shape.rows]
        cells, rows_of = state[:PROMPT], self._rows_of[: shape.slots]
        self._cache.step(Step(shape=shape, cells=cells, prompts=prompts, places=places, rows_of=rows_of))
        positions = bases + places
        if self._token_pass is not None:
            hidden = self._token_pass(tokens, positions)
        else:
            hidden = self._forward(tokens.unsqueeze(1), positions.unsqueeze(1))[:, 0]
        places += added
        drawn, logprobs = self._draw(hidden, slots, copies, places)
        tokens.copy_(drawn)
        self._last_logprobs[: shape.rows].copy_(logprobs)

    def _draw(self, hidden: Tensor, slots: Tensor, copies: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._logits(hidden.to(self._head.weight))
        if self._scales is not None:
            logits *= self._scales[slots, copies].unsqueeze(1)
        return self._draw_tokens(logits, None if self._numbers is None else self._numbers[slots, copies, places])

    def _forward(self, ids: Tensor, positions: Tensor, **options) -> Tensor:
        """Return the last hidden states of the model's body."""
        return self._body(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._any_mask,
            use_cache=False,
            shared_cache=self._cache,
            **options,
        ).last_hidden_state


def _parts(lengths: Sequence[int]) -> Iterator[slice]:
    """Cut prompts or answers of these lengths into packed passes."""
    start = tokens = 0
    for index, length in enumerate(lengths):
        if index > start and tokens + length > PREFILL_TOKENS:
            yield slice(start, index)
            start, tokens = index, 0
        tokens += length
    if lengths:
        yield slice(start, len(lengths))
