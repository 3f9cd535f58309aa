"""A gateway with the policy that answers at it: an endpoint of the OpenAI API."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import openai
from servers import wait_until

from grpo.agents.gateway import EpisodeLimits, Gateway, RunningEpisode
from grpo.agents.journal import RunJournal
from grpo.agents.tree import Episode, Formats
from grpo.sampling.drawer import Drawer
from grpo.sampling.generate import policy_that_draws
from grpo.sampling.rows import Rows


class Desk:
    """A gateway, and a drawer that draws while `is_open` is on."""

    def __init__(self, model, tokenizer, *, ends: list[int], context: int, longest: int, temperature: float):
        self.model, self.ends = model, ends
        self.context, self.longest, self.temperature = context, longest, temperature
        self.formats = Formats(tokenizer, self.ends, "auto", None)
        self.gateway, self.drawer, self.is_open = Gateway(16, 16), None, True
        self.waits: list[bool] = []

    def begin(
        self, number: int = 0, turns: int = 100, journal: RunJournal | None = None, may_sample: bool = False
    ) -> tuple[RunningEpisode, str]:
        session = RunningEpisode(
            episode=Episode(self.formats, (7, 3, number)),
            drawer=self.drawer,
            limits=EpisodeLimits(
                longest=self.longest,
                context=self.context,
                turns=turns,
                temperature=self.temperature,
                draw_temperature=self.temperature,
                may_sample=may_sample,
            ),
            version=5,
            journal=journal,
            on_wait=self.waits.append,
        )
        return session, self.gateway.open(session)

    def client(self, key: str, **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.gateway.url, api_key=key, **{"max_retries": 0} | options)

    def run(self) -> None:
        settings = {"slots": 16, "copies": 1, "longest_prompt": 8, "longest": self.context}
        settings |= {"temperature": self.temperature, "has_scales": True}
        with policy_that_draws(self.model):
            rows = Rows(self.model, rows=16, **settings, is_greedy=False, ends=self.ends, graphs=None, vision=None)
            self.drawer = Drawer(rows, self.context, look_every=1)
            self.drawer.run(lambda: not self.is_open)


@contextmanager
def open_desk(model, tokenizer, **settings) -> Iterator[Desk]:
    desk = Desk(model, tokenizer, **settings)
    thread = threading.Thread(target=desk.run)
    thread.start()
    wait_until(lambda: desk.drawer is not None)
    try:
        yield desk
    finally:
        desk.is_open = False
        desk.drawer.wake()
        thread.join()
        desk.gateway.shut_down()
