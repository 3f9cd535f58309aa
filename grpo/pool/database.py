"""The database of a pool, whatever engine keeps it, and the SQLite file with its schema, lock and errors."""

import fcntl
import hashlib
import logging
import os
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from grpo.config.errors import ConfigError
from grpo.wire.refusals import ProtocolError

log = logging.getLogger(__name__)

APPLICATION, SCHEMA_VERSION = 0x47525031, 5  # "GRP1"; another schema gets another number
SCHEMA = """
-- A `checksum` is the result of `checksum` for the row's other values, in the order of its columns.
CREATE TABLE run (number INTEGER PRIMARY KEY CHECK (number = 1), info BLOB NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE tasks (
    group_id INTEGER NOT NULL, attempt INTEGER NOT NULL, version INTEGER NOT NULL,
    worker TEXT, tokens INTEGER,  -- who drew it, and how many tokens; NULL like `drawn`
    newest INTEGER,  -- the newest version that drew a token of it; NULL like `drawn`
    prompt_ids BLOB NOT NULL,  -- int32
    columns TEXT NOT NULL,  -- of the row, as JSON, for an environment
    pictures BLOB NOT NULL,  -- SHA-256 of each, 32 bytes: they are among the files
    drawn BLOB,  -- the completions as grpo.pool.task_tensors.encode_drawn writes them; NULL while there are none
    checksum BLOB NOT NULL,
    PRIMARY KEY (group_id, attempt)
);
CREATE INDEX open_tasks ON tasks (version, group_id, attempt) WHERE drawn IS NULL;
CREATE INDEX pictured_tasks ON tasks (pictures) WHERE length(pictures) > 0;
CREATE TABLE versions (
    version INTEGER PRIMARY KEY,
    weights TEXT NOT NULL,  -- their SHA-256
    info BLOB,  -- NULL once the version was dropped: what it drew stays
    checksum BLOB NOT NULL
);
CREATE TABLE journal (  -- of episodes of tasks without completions; each row is a part
    group_id INTEGER NOT NULL, attempt INTEGER NOT NULL,
    weights TEXT NOT NULL,  -- SHA-256 of those that drew it
    lines BLOB NOT NULL,  -- see grpo/agents/journal.py
    checksum BLOB NOT NULL
);
CREATE INDEX journal_of_task ON journal (group_id, attempt);
"""
LEASES_SCHEMA = """
CREATE TEMPORARY TABLE leases (
    group_id INTEGER NOT NULL, attempt INTEGER NOT NULL, worker TEXT NOT NULL, PRIMARY KEY (group_id, attempt)
);
CREATE TEMPORARY TABLE workers (
    name TEXT PRIMARY KEY,
    seen DOUBLE PRECISION NOT NULL,  -- time of its last request, as Database.now
    room INTEGER NOT NULL,  -- tasks that it asked for
    is_suspended INTEGER NOT NULL,
    state TEXT NOT NULL  -- the others of WorkerState's fields, as JSON
);
"""
_KEYS = {"run": ["number"], "tasks": ["group_id", "attempt"], "versions": ["version"], "workers": ["name"]}
SHARED, LEASES, ALONE = "shared", "leases", "alone"
"""Kinds of transactions of several pools on one database: with all but ALONE; the same, but with no other of LEASES;
with no other. Pools on one file have one process."""
_PAGE_BYTES = 16 << 10  # a row of 16 MiB was read four times as fast as from pages of 4 KiB; completions have 100 KB
_LOG_BYTES = 64 << 20  # of the log beside the file, at most, once it was written back


class Database(ABC):
    """A pool's tables. Any thread may call all methods; all raise ProtocolError, 503, and store nothing, if the disk or
    the engine fails."""

    def __init__(self, field: str, place: str, on_damage: Callable[[ConfigError], None]):
        """`place` is a setting's value, to show. `on_damage` is called if a later request finds it damaged or gone."""
        self.place, self.setting, self._on_damage = place, f"{field}={place!r}", on_damage
        self.lock = threading.RLock()  # a caller holds it over several reads of one state
        self._is_in_transaction = False

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def size(self) -> int:
        """Return its bytes on the disk."""

    @abstractmethod
    def now(self) -> float:
        """Return seconds, by a clock that all pools on this database share."""

    @abstractmethod
    def sql(self, statement: str, *values: Any) -> list[tuple]:
        """Execute a statement; return its rows."""

    @abstractmethod
    def _begun(self, kind: str) -> Any:
        """Begin a transaction, as a context that commits it, or rolls it back after an exception."""

    def row(self, statement: str, *values: Any) -> tuple | None:
        return next(iter(self.sql(statement, *values)), None)

    def checked_rows(self, name: str, statement: str, *values: Any) -> list[tuple]:
        """Return rows without their checksum. `name` is for messages, with the row's first values: "version {}"."""
        rows = self.sql(statement, *values)
        for row in rows:
            if not is_whole(row):
                raise self._fail(damaged(self.setting, "its checksum differs", name.format(*row)))
        return [row[:-1] for row in rows]

    def store(self, table: str, **row: Any) -> None:
        """Store a row, all its columns in their order, with its checksum; it replaces the row of the same key."""
        self.replace(table, **row, checksum=checksum(row.values()))

    def replace(self, table: str, **row: Any) -> None:
        """Store a row, inside a transaction; it replaces the row of the same key."""
        keys = _KEYS[table]
        is_same = " AND ".join(f"{key} = ?" for key in keys)
        self.sql(f"DELETE FROM {table} WHERE {is_same}", *(row[key] for key in keys))
        self.insert(table, **row)

    def insert(self, table: str, **row: Any) -> None:
        """Store a row, inside a transaction."""
        self.sql(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", *row.values())

    @contextmanager
    def transaction(self, kind: str = ALONE) -> Iterator[None]:
        """Store all changes of the block, or none. Inside another transaction they are that one's."""
        with self.lock:
            if self._is_in_transaction:
                yield
                return
            self._is_in_transaction = True
            try:
                with self._begun(kind):
                    yield
            finally:
                self._is_in_transaction = False

    def _fail(self, fault: ConfigError) -> ProtocolError:
        """Let the pool end; return the answer to the present request."""
        self._on_damage(fault)
        return ProtocolError(503, "worker_died", f"{self.setting} is damaged or gone: the pool is ending", 5)


class SqliteDatabase(Database):
    """A file, open for this process alone."""

    def __init__(self, path: str, on_damage: Callable[[ConfigError], None]):
        """Open the file, or make it. Raises ConfigError if it is no pool's, damaged, or in use."""
        super().__init__("pool_file", path, on_damage)
        try:
            self._file = lock_file(path)
        except BlockingIOError as error:
            reason = "another pool writes to it"
            raise unusable(self.setting, reason, "wait for its end, or name another file") from error
        except OSError as error:
            raise unusable(self.setting, error.strerror, "name a file to write to") from error
        try:
            self._connection = _open(path, self.setting)
        except ConfigError:
            os.close(self._file)
            raise
        self._names = [path, f"{path}-wal"]
        self._opened = {name: os.stat(name) for name in self._names if os.path.exists(name)}

    def close(self) -> None:
        with self.lock:
            self._connection.close()
            os.close(self._file)  # not before: closing a file ends all locks that SQLite holds on it

    def size(self) -> int:
        return sum(os.path.getsize(name) for name in self._names if os.path.exists(name))

    def now(self) -> float:
        return time.monotonic()

    def sql(self, statement: str, *values: Any) -> list[tuple]:
        with self.lock, self._failures():
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def _begun(self, kind: str) -> Iterator[None]:
        with self._connection:  # which rolls back after an exception
            self.sql("BEGIN IMMEDIATE")
            yield
            self._check_place()
            self.sql("COMMIT")

    def _check_place(self) -> None:
        """Raise ProtocolError if the file was moved, replaced or deleted: a later pool would not find the new rows."""
        for name, opened in self._opened.items():
            if not (os.path.exists(name) and os.path.samestat(os.stat(name), opened)):
                reason = f"{name} was moved, replaced or deleted while the pool was writing it"
                raise self._fail(unusable(self.setting, reason, "put it back or name another file, and start again"))

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn errors of the disk or the file into ProtocolError."""
        try:
            yield
        except sqlite3.OperationalError as error:
            message = f"{self.place} cannot be written or read ({error}): its disk may be full"
            log.error(message)
            raise ProtocolError(503, "no_space", message, retry_after=5) from error
        except sqlite3.DatabaseError as error:
            raise self._fail(damaged(self.setting, error)) from error


def open_read_only(path: str, setting: str) -> sqlite3.Connection:
    """Open a pool's file to read it, also while a pool runs on it. Raises ConfigError if it is no pool's. Its message
    begins with `setting`: a field and its value."""
    if not Path(path).is_file():
        raise unusable(setting, "there is no such file", "name the pool_file of a pool")
    # Without a log beside it no process has it open, and it may lie where nothing can be written.
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    with _connected(path, setting, f"?{mode}") as connection:
        _check_kind(setting, connection)
        return connection


def lock_file(path: str | Path) -> int:
    """Make and lock a file; return its descriptor. Raises BlockingIOError if another process has locked it, OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # SQLite's own locks are of another kind
    except OSError:
        os.close(file)
        raise
    return file


def _open(path: str, setting: str) -> sqlite3.Connection:
    with _connected(path, setting) as connection:
        if connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            kind = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA_VERSION};"
            connection.executescript(f"BEGIN; {kind} {SCHEMA} COMMIT;")
        _check_kind(setting, connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk
        connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # and make the log, for _check_place
        connection.execute("PRAGMA secure_delete = OFF")  # Debian's SQLite would write zeros over deleted rows
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.executescript(LEASES_SCHEMA)
        return connection


@contextmanager
def _connected(path: str, setting: str, query: str = "") -> Iterator[sqlite3.Connection]:
    """Open a file and prepare it inside. Close it after an error, and raise ConfigError."""
    with refuse_damage(setting):
        uri = Path(path).absolute().as_uri() + query
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        # The checksum refuses text that is no UTF-8.
        connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
        try:
            yield connection
        except (ConfigError, sqlite3.Error):
            connection.close()
            raise


def _check_kind(setting: str, connection: sqlite3.Connection) -> None:
    """Raise ConfigError if the file is not a pool's."""
    names = "application_id", "user_version"
    (application,), (version,) = (connection.execute(f"PRAGMA {name}").fetchone() for name in names)
    if application != APPLICATION:
        raise unusable(setting, "it is the database of another program", "name another file")
    if version != SCHEMA_VERSION:
        reason = f"it has schema {version}, and this program reads {SCHEMA_VERSION}"
        raise unusable(setting, reason, "use the release that made it, or name another file")


def checksum(values: Iterable[int | str | bytes | None]) -> bytes:
    """Return the SHA-256 of a row's values."""
    digest = hashlib.sha256()
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(b"%d " % len(data) + data)
    return digest.digest()


def is_whole(row: tuple) -> bool:
    """Return whether a row's last value is its checksum."""
    return checksum(row[:-1]) == row[-1]


@contextmanager
def refuse_damage(setting: str, name: str = "") -> Iterator[None]:
    """Turn SQLite's errors into a refusal. `name` is the part that is read."""
    try:
        yield
    except sqlite3.Error as error:
        raise damaged(setting, error, name) from error


def damaged(setting: str, reason: object, name: str = "") -> ConfigError:
    what = f"{name} is damaged" if name else "no pool's file, or damaged"
    return unusable(setting, f"{what} ({reason})", "name another file, or a copy of this one")


def unusable(setting: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f"{setting}: {reason}: {remedy}")
