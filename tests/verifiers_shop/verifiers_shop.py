"""A shop, as an environment of verifiers has it: tasks, a server of tools, rewards and a metric."""

import verifiers.v1 as vf

__all__ = ["Shop"]

PRICES = {"pen": 7, "cake": 12}
CLOSED = 3  # the task that fails


class Till(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None  # the tool keeps its name

    @vf.tool
    async def price(self, item: str) -> int:
        """Tell the price of an item."""
        return PRICES[item]


class Wish(vf.TaskData):
    number: int


class Buy(vf.Task[Wish]):
    @vf.reward(weight=2.0)
    async def asked(self, trace) -> float:
        return float(trace.num_turns > 1)

    @vf.reward
    async def open(self, task) -> float:
        if task.number == CLOSED:
            raise LookupError("this shop is closed")
        return 0.25

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)

    @classmethod
    def toolsets(cls, config):
        return [Till(vf.ToolsetConfig())]


class Shop(vf.Taskset[Buy]):
    def load(self):
        for number in range(8):
            yield Buy(Wish(prompt=f"{number}: how much is a pen?", number=number), self.config.task)


if __name__ == "__main__":
    Till.run()
