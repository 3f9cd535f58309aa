"""Every setting of `python -m grpo.report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from grpo.config.errors import require
from grpo.config.fields import Section, option

MOST_RUNS = 10
"""the number of colours by which a page tells runs apart"""


@dataclass
class ReportConfig(Section):
    """Every setting of `python -m grpo.report`."""

    HEADING = "report"

    runs: list[str] = option(
        [], "folders of runs to show over each other; their names may also stand alone, without --runs", common=True
    )
    output: str | None = option(
        None, "folder to make; unset is the folder report in the first run's folder", common=True
    )
    smoothing: int = option(
        0,
        "steps of the centred moving average of the curves; 1 is none, 0 a twentieth of the longest run and at least 5",
        at_least=0,
        common=True,
    )
    png: bool = option(False, "draw each section of the page as a PNG too, beside it", common=True)
    serve: bool = option(
        False,
        "show the page live in this machine's browser, beside runs that go on, until Ctrl-C; writes no file",
        common=True,
    )
    port: int = option(
        59880,
        "the TCP port of --serve (0 lets the system choose one)",
        needs="serve",
        at_least=0,
        at_most=65535,
        common=True,
    )

    POSITIONAL: ClassVar = "runs"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.runs) > 0, "runs", self.runs, "name the folder of a run")
        require(len(self.runs) <= MOST_RUNS, "runs", self.runs, f"only {MOST_RUNS} can be told apart: name fewer")
        written = self.output is not None or self.png
        require(not (self.serve and written), "serve", True, "it writes no file: leave output and png out")
