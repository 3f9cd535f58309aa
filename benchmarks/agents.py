"""Programs that ask the policy by the OpenAI API: a request, many episodes, and a training step beside TRL's.

    python -m benchmarks.agents                       everything, perhaps 15 minutes on two cores
    python -m benchmarks.agents --part request        a request through the gateway beside the same draw in process
    python -m benchmarks.agents --part episodes       episodes a second with 1, 16 and 256 programs, and their memory
    python -m benchmarks.agents --part step           a step of `make demo-agent` beside TRL: benchmarks/agent_step.py

Needs openai, and for steps trl (written for 1.16.0). The models are of the demo's size, 0.1 M parameters.

request: a client in a process of its own holds conversations, by http.client and by `openai.OpenAI`. The third side
gives the drawer the very segments that requests become, with the same ids, random numbers and held rows, and waits for
them in the process that draws. The three take turns, request by request, and must draw the same ids.

episodes: a program asks twice, and between waits for its tool. All must end well, with the ids that the same episodes
had at first, when one ran at a time: of those one in fifty may differ, as the rows beside it move the last bits of
log-probs. MiB are of a program while all wait for a slow tool (PSS: with its share of what processes share).
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import agent_step
from benchmarks.agent_step import playing
from benchmarks.common import REPOSITORY, machine, spread, table
from demo.model import build_model, build_tokenizer
from grpo.agents.gateway import EpisodeLimits, Gateway, RunningEpisode
from grpo.agents.requests import read_request
from grpo.agents.tree import Episode, Formats
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example, Rollout
from grpo.model.trial import make_batcher
from grpo.sampling.drawer import Drawer, Segment
from grpo.sampling.generate import policy_that_draws
from grpo.sampling.rows import Rows

DIRECT, HTTP, OPENAI = "in process", "http.client", "openai.OpenAI"
TURNS, CONTEXT, ROWS = 4, 480, 64
LENGTH = 16  # tokens of an answer in episodes
LEAST = 48  # episodes of a round
ALIKE = 0.98  # least share of episodes with the same ids
PROGRAM = """
import asyncio


async def solve(task, client):
    messages = [{{"role": "user", "content": task["question"]}}]
    for seconds in ({tool}, 0):
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens={length})
        messages += [answer.choices[0].message, {{"role": "user", "content": "And then?"}}]
        if seconds:
            await asyncio.sleep(seconds)
    return 1.0
"""


def client(url: str) -> None:
    """Ask what each line of standard input says, and print the answer with its seconds."""
    import openai

    place = url.removeprefix("http://").removesuffix("/v1")
    connection, asker = http.client.HTTPConnection(place), openai.OpenAI(base_url=url, api_key="none")
    for line in sys.stdin:
        way, key, body = json.loads(line)
        start = time.perf_counter()
        if way == HTTP:
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            text = json.load(connection.getresponse())["choices"][0]["message"]["content"]
        else:
            answer = asker.with_options(api_key=key).chat.completions.create(**body)
            text = answer.choices[0].message.content
        print(json.dumps([time.perf_counter() - start, text]), flush=True)


class Desk:
    """A gateway with a drawer, and a client in a process of its own."""

    def __init__(self, tokens: int):
        tokenizer, self._tokens = build_tokenizer(seed=0), tokens
        torch.manual_seed(0)
        self._model, self._ends = build_model(tokenizer).eval(), [tokenizer.eos_token_id]
        make_batcher(self._model, tokenizer.pad_token_id)  # switches packed attention on
        self._formats, self._gateway = Formats(tokenizer, self._ends, "auto", None), Gateway(ROWS, ROWS)
        self._is_over, ready = False, threading.Event()
        self._thread = threading.Thread(target=self._draw, args=[ready])
        self._thread.start()
        ready.wait()
        command = [sys.executable, "-m", "benchmarks.agents", "--client", self._gateway.url]
        self._client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _draw(self, ready: threading.Event) -> None:
        sizes = {"rows": ROWS, "slots": ROWS, "copies": 1, "longest_prompt": 256, "longest": CONTEXT}
        with policy_that_draws(self._model):
            settings = {"temperature": 1.0, "is_greedy": False, "ends": self._ends, "graphs": None, "vision": None}
            self._drawer = Drawer(Rows(self._model, **sizes, **settings), CONTEXT, look_every=1)
            ready.set()
            self._drawer.run(lambda: self._is_over)

    def talk(self, number: int) -> list[dict[str, float]]:
        """Hold the conversation of this number in each way, request by request; return the seconds of each. Exits where
        they draw different ids."""
        limits = EpisodeLimits(longest=self._tokens, context=CONTEXT, turns=TURNS, temperature=1.0)
        episodes = {way: Episode(self._formats, (0, number, 0)) for way in (DIRECT, HTTP, OPENAI)}
        open_session = partial(RunningEpisode, drawer=self._drawer, limits=limits, version=0)
        keys = {way: self._gateway.open(open_session(episode=episode)) for way, episode in episodes.items()}
        last, seconds = None, []
        messages = [{"role": "user", "content": f"{number}: {'Tom has 3 apples and eats one. ' * 8}"}]
        for turn in range(TURNS):
            body, taken, texts = {"model": "policy", "messages": messages}, {}, []
            ways = list(episodes)
            for way in ways if (number + turn) % 2 else reversed(ways):
                if way == DIRECT:
                    taken[way], last = self._submit(episodes[way], body, last)
                    continue
                print(json.dumps([way, keys[way], body]), file=self._client.stdin, flush=True)
                taken[way], text = json.loads(self._client.stdout.readline())
                texts.append(text)
            if texts != [episodes[DIRECT].nodes[-1].reply["content"]] * 2:
                sys.exit("the ways drew different answers")
            messages = [*messages, {"role": "assistant", "content": texts[0]}, {"role": "user", "content": "And then?"}]
            seconds.append(taken)
        drawn = [[(node.prompt_ids, node.ids) for node in episode.nodes] for episode in episodes.values()]
        if not drawn[0] == drawn[1] == drawn[2]:
            sys.exit("the ways drew different ids")
        for key in keys.values():
            self._gateway.close(key)
        return seconds

    def _submit(self, episode: Episode, body: dict, last: Segment | None) -> tuple[float, Segment]:
        """Draw what a request would, without one; return the seconds and the segment."""
        [node] = episode.ask(read_request(json.dumps(body).encode()))
        room = min(self._tokens, CONTEXT - len(node.prompt_ids))
        numbers = episode.numbers(node, room)
        segment = Segment(prompt_ids=node.prompt_ids, room=room, numbers=numbers, after=last)
        start = time.perf_counter()
        self._drawer.submit(segment)
        drawn = segment.done.result()
        seconds = time.perf_counter() - start
        episode.drew(node, drawn.ids, drawn.logprobs, 0)
        return seconds, segment

    def close(self) -> None:
        self._client.stdin.close()
        self._client.wait()
        self._is_over = True
        self._drawer.wake()
        self._thread.join()
        self._gateway.shut_down()


def part_request(conversations: int, tokens: list[int]) -> None:
    rows = []
    for count in tokens:
        desk = Desk(count)
        desk.talk(conversations)  # everything is loaded
        taken = [each for number in range(conversations) for each in desk.talk(number)]
        desk.close()
        milliseconds = {way: [1000 * each[way] for each in taken] for way in (DIRECT, HTTP, OPENAI)}
        more = {
            way: sorted(one - other for one, other in zip(milliseconds[way], milliseconds[DIRECT], strict=True))
            for way in (HTTP, OPENAI)
        }
        cells = [f"{statistics.median(values):.2f}" for values in milliseconds.values()]
        cells += [f"{statistics.median(m):.2f}, {m[len(m) * 95 // 100]:.2f}" for m in more.values()]
        rows.append([f"{count} tokens", *cells])
    print(f"\n### A request, {conversations * TURNS} times in turn: milliseconds, medians\n")
    head = ["an answer of", DIRECT, HTTP, OPENAI, *(f"{way}: more than in process, and of 95 %" for way in more)]
    print(table(head, rows))


def part_episodes(counts: list[int], tools: list[float], repeats: int) -> None:
    tokenizer = build_tokenizer(seed=0)
    torch.manual_seed(0)
    model, alone = build_model(tokenizer).eval(), {}
    options = {"max_prompt_length": CONTEXT - LENGTH, "max_completion_length": LENGTH, "sequences_per_generate": ROWS}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "program.py"
        for tool, count in ((tool, count) for tool in tools for count in counts):
            config = TrainerConfig(
                "model", **options, agent=f"{write(file, tool)}:solve", max_concurrent_episodes=count
            )
            episodes = max(LEAST, 2 * count)
            taken = []
            with playing(config, model, tokenizer) as sampler:
                for _ in range(repeats + 1):  # in the first everything is loaded
                    start = time.perf_counter()
                    rollouts = [rollout for [rollout] in sampler.sample(examples(episodes), 1, 1.0, 0)]
                    taken.append(time.perf_counter() - start)
                    check(rollouts, alone)
            tokens = sum(rollout.drawn_tokens for rollout in rollouts)
            rates = [[each / seconds for seconds in taken[1:]] for each in (episodes, tokens)]
            memory = memory_of(write(file, 5 + count / 20), config, model, tokenizer) if tool == tools[-1] else ""
            rows.append([f"{tool:g} s", count, spread(rates[0], 1), spread(rates[1], 0), memory])
            print(*rows[-1], file=sys.stderr)
    print(f"\n### Episodes of two requests, with answers of {LENGTH} tokens; {repeats} rounds of {LEAST} and more\n")
    print(table(["the tool takes", "programs at a time", "episodes a second", "tokens a second", "MiB of each"], rows))


def write(file: Path, tool: float) -> Path:
    file.write_text(PROGRAM.format(length=LENGTH, tool=tool))
    return file


def examples(count: int) -> list[Example]:
    rows = [{"question": f"{number}: how many are left?"} for number in range(count)]
    return [Example(index=number, prompt="", prompt_ids=[], columns=row) for number, row in enumerate(rows)]


def check(rollouts: list[Rollout], alone: dict[int, list[int]]) -> None:
    """Exit where episodes failed, or too many have other ids than at first."""
    if any(rollout.outcome.failure or len(rollout.tree) != 2 for rollout in rollouts):
        sys.exit("episodes failed")
    alike = [each.completion_ids == alone.setdefault(n, each.completion_ids) for n, each in enumerate(rollouts)]
    if sum(alike) < ALIKE * len(alike):
        sys.exit(f"{len(alike) - sum(alike)} of {len(alike)} episodes drew other ids than at first")


def memory_of(file: Path, config: TrainerConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the median MiB of programs while all wait."""
    count, found = config.max_concurrent_episodes, []

    def look() -> None:
        programs, start = [], time.monotonic()
        while len(programs) < count and time.monotonic() < start + 60:
            time.sleep(1)  # the last to begin gets to its tool, too
            processes = psutil.Process().children(recursive=True)
            parents = {process.ppid() for process in processes}
            programs = [process for process in processes if process.pid not in parents]
        with suppress(psutil.Error):
            found.append(statistics.median(program.memory_full_info().pss for program in programs) / 2**20)

    with playing(config, model, tokenizer) as sampler:
        thread = threading.Thread(target=look)
        thread.start()
        sampler.sample(examples(count), 1, 1.0, 0)
        thread.join()
    return f"{found[0]:.1f}" if found else "not measured"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["request", "episodes", "step", "all"], default="all")
    parser.add_argument("--conversations", type=int, default=100, help=f"of {TURNS} requests")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32], help="of a request's answer")
    parser.add_argument("--at_a_time", type=int, nargs="+", default=[1, 16, 256], help="episodes")
    parser.add_argument("--tools", type=float, nargs="+", default=[0.0, 0.2], help="seconds of a tool")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of episodes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of model, data and training")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, nargs="+", choices=[1, 2], default=[2], help="of TRL's sides")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/agents"), help="for what steps make")
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--split", default="train", help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.chdir(REPOSITORY)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    if arguments.client:
        return client(arguments.client)
    if arguments.worker:
        return agent_step.worker(*arguments.worker, arguments.seeds[0], arguments.steps, arguments.split)
    print(machine())
    if arguments.part in ("request", "all"):
        part_request(arguments.conversations, arguments.tokens)
    if arguments.part in ("episodes", "all"):
        part_episodes(arguments.at_a_time, arguments.tools, arguments.repeats)
    if arguments.part in ("step", "all"):
        agent_step.part_step(arguments.folder, arguments.seeds, arguments.steps, arguments.processes)


if __name__ == "__main__":
    main()
