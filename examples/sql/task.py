"""Write a query for SQLite. What it returns is compared with what the gold query returns, whatever its words."""

import hashlib
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from reward import text_of

TRAIN, TEST = 400, 40
TEAMS = ("sales", "legal", "design", "support")
SCHEMA = "CREATE TABLE people (name TEXT, team TEXT, age INTEGER, pay INTEGER)"
READS = sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION
MOST_INSTRUCTIONS = 1_000_000  # of SQLite's machine: some milliseconds
LONGEST = 100_000  # bytes of a query, and of a value that it makes
WANTED = {"many": "count(*)", "old is the oldest": "max(age)", "much pay is the most": "max(pay)"}


class Problem(NamedTuple):
    """A question about the table, and a query that answers it."""

    wanted: str
    team: str
    age: int

    @property
    def question(self) -> str:
        return f"How {self.wanted} in {self.team} above {self.age}?"

    @property
    def query(self) -> str:
        return f"SELECT {WANTED[self.wanted]} FROM people WHERE team = '{self.team}' AND age > {self.age}"


def problems(rng: random.Random, held_out: bool) -> Iterator[Problem]:
    """Draw without end from one side of the split."""
    while True:
        problem = Problem(rng.choice([*WANTED]), rng.choice(TEAMS), rng.randint(20, 60))
        if (hashlib.sha256(repr(problem).encode()).digest()[0] % 10 == 0) == held_out:
            yield problem


def row_of(problem: Problem) -> dict:
    return {"question": problem.question, "query": problem.query}


def reward(completions, query, **kwargs) -> list[float]:
    """Return 1.0 for a query with the gold query's rows, else 0.0."""
    texts = [text_of(completion).strip() for completion in completions]
    with closing(database()) as connection:
        gold = {each: rows(connection, each) for each in {*query}}
        found = [rows(connection, text) for text in texts]
        return [float(each is not None and each == gold[name]) for each, name in zip(found, query, strict=True)]


reward.is_verdict = True  # evaluation counts it as accuracy


def database() -> sqlite3.Connection:
    """Return the table in memory, which queries can only read."""
    rng, connection = random.Random(0), sqlite3.connect(":memory:")
    people = [(f"p{n}", rng.choice(TEAMS), rng.randint(18, 65), rng.randint(20, 90)) for n in range(400)]
    connection.execute(SCHEMA)
    connection.executemany("INSERT INTO people VALUES (?, ?, ?, ?)", people)
    connection.commit()
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
    connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY)
    return connection


def rows(connection: sqlite3.Connection, query: str) -> list[tuple] | None:
    """Return the first thousand rows of a query, sorted; None if it fails, changes something or takes too long."""
    connection.set_progress_handler(lambda: 1, MOST_INSTRUCTIONS)
    try:
        return sorted(connection.execute(query).fetchmany(1000), key=repr)
    except (sqlite3.Error, sqlite3.Warning, ValueError):  # Warning: two statements; ValueError: a NUL in the text
        return None


def right(problem: Problem, rng: random.Random) -> str:
    """Return a solution, for the tiny model of examples/prepare.py."""
    return problem.query


def wrong(problem: Problem, rng: random.Random) -> str:
    """Return what the tiny model mostly writes instead: another query, or none."""
    other = problem._replace(age=rng.randint(20, 60), wanted=rng.choice([*WANTED]))
    return rng.choice([other.query, problem.query.replace("FROM people", "FROM team"), f"{problem.team} {problem.age}"])
