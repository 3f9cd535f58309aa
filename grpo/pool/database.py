"""The pool's SQLite file: its schema, its lock, and the errors of its disk."""

import fcntl
import hashlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from grpo.config.errors import ConfigError
from grpo.wire.refusals import ProtocolError

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20  # most bytes of a file in one row, and in one answer
_APPLICATION, _SCHEMA_VERSION = 0x47525031, 3  # "GRP1"; another schema gets another number
_PAGE_BYTES = 16 << 10  # a piece of 16 MiB is read four times as fast as from pages of 4 KiB
_SCHEMA = """
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
CREATE TABLE versions (
    version INTEGER PRIMARY KEY,
    weights TEXT NOT NULL,  -- their SHA-256
    info BLOB,  -- NULL once the version was dropped: what it drew stays
    checksum BLOB NOT NULL
);
CREATE TABLE files (sha256 TEXT PRIMARY KEY, size INTEGER NOT NULL, received INTEGER NOT NULL);
CREATE TABLE pieces (
    sha256 TEXT NOT NULL, start INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (sha256, start)
);
"""


class Database:
    """The file, open for this process alone. Any thread may call all methods; all raise ProtocolError, 503, if the
    disk fails."""

    def __init__(self, path: str, on_damage: Callable[[ConfigError], None]):
        """Open the file, or make it. `on_damage` is called if a later request finds it damaged or gone. Raises
        ConfigError if it is no pool's, damaged, or in use."""
        self.path, self._on_damage = path, on_damage
        self.setting = f"pool_file={path!r}"  # the first words of messages about the file
        self.lock = threading.RLock()  # a caller holds it over several reads of one state
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
        """Return the bytes of the file and of the log beside it."""
        return sum(os.path.getsize(name) for name in self._names if os.path.exists(name))

    def row(self, statement: str, *values: Any) -> tuple | None:
        return next(iter(self.sql(statement, *values)), None)

    def sql(self, statement: str, *values: Any) -> list[tuple]:
        """Execute a statement; return its rows."""
        with self.lock, self._failures():
            return self._connection.execute(statement, values).fetchall()

    def checked_rows(self, name: str, statement: str, *values: Any) -> list[tuple]:
        """Return rows without their checksum. `name` is for messages, with the row's first values: "version {}"."""
        rows = self.sql(statement, *values)
        for row in rows:
            with self._failures(name.format(*row)):
                check_row(row)
        return [row[:-1] for row in rows]

    def store(self, table: str, *values: Any) -> None:
        """Store a row with its checksum; it replaces the row of the same key."""
        places = ", ".join("?" * (len(values) + 1))
        self.sql(f"REPLACE INTO {table} VALUES ({places})", *values, checksum(values))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Store all changes of the block, or none."""
        with self.lock, self._connection:  # which rolls back after an exception
            self.sql("BEGIN IMMEDIATE")
            yield
            self._check_place()
            self.sql("COMMIT")

    def _check_place(self) -> None:
        """Raise ProtocolError if the file was moved, replaced or deleted: a later pool would not find the new rows."""
        for name, opened in self._opened.items():
            if not (os.path.exists(name) and os.path.samestat(os.stat(name), opened)):
                reason = f"{name} was moved, replaced or deleted while the pool was writing it"
                self._on_damage(unusable(self.setting, reason, "put it back or name another file, and start again"))
                raise ProtocolError(503, "worker_died", f"{reason}: the pool is ending", 5)

    @contextmanager
    def _failures(self, name: str = "") -> Iterator[None]:
        """Turn errors of the disk or the file into ProtocolError. `name` is the part that is read."""
        try:
            yield
        except sqlite3.OperationalError as error:
            message = f"{self.path} cannot be written or read ({error}): its disk may be full"
            log.error(message)
            raise ProtocolError(503, "no_space", message, retry_after=5) from error
        except sqlite3.DatabaseError as error:
            self._on_damage(damaged(self.setting, error, name))
            raise ProtocolError(503, "worker_died", f"{self.path} is damaged: the pool is ending", 5) from error


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
            kind = f"PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_SCHEMA_VERSION};"
            connection.executescript(f"BEGIN; {kind} {_SCHEMA} COMMIT;")
        _check_kind(setting, connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk
        connection.execute(f"PRAGMA journal_size_limit = {4 * PIECE_BYTES}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # and make the log, for _check_place
        connection.execute("PRAGMA secure_delete = OFF")  # Debian's SQLite would write zeros over gigabytes
        return connection


@contextmanager
def _connected(path: str, setting: str, query: str = "") -> Iterator[sqlite3.Connection]:
    """Open a file and prepare it inside. Close it after an error, and raise ConfigError."""
    with refuse_damage(setting):
        uri = Path(path).absolute().as_uri() + query
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        # The checksum refuses what is no UTF-8.
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
    if application != _APPLICATION:
        raise unusable(setting, "it is the database of another program", "name another file")
    if version != _SCHEMA_VERSION:
        reason = f"it has schema {version}, and this program reads {_SCHEMA_VERSION}"
        raise unusable(setting, reason, "use the release that made it, or name another file")


def checksum(values: Iterable[int | str | bytes | None]) -> bytes:
    """Return the SHA-256 of a row's values."""
    digest = hashlib.sha256()
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(b"%d " % len(data) + data)
    return digest.digest()


def check_row(row: tuple) -> None:
    """Raise sqlite3.DatabaseError, as SQLite does for a damaged page, unless a row's last value is its checksum."""
    if checksum(row[:-1]) != row[-1]:
        raise sqlite3.DatabaseError("its checksum differs")


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
