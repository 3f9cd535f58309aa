"""A pool's tables in a PostgreSQL database, which several pools may serve at a time."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg

from grpo.config.errors import ConfigError, one_line
from grpo.pool import database as schema
from grpo.pool.database import ALONE, LEASES, SHARED, Database, damaged, unusable
from grpo.wire.refusals import ProtocolError

log = logging.getLogger(__name__)

# Of advisory locks (PostgreSQL, 13.3.5), whose numbers hold in the whole database.
_DATABASE, _LEASES = schema.APPLICATION, schema.APPLICATION + 1
_LOCKS = {
    SHARED: f"SELECT pg_advisory_xact_lock_shared({_DATABASE})",
    LEASES: f"SELECT pg_advisory_xact_lock_shared({_DATABASE}), pg_advisory_xact_lock({_LEASES})",
    ALONE: f"SELECT pg_advisory_xact_lock({_DATABASE})",
}
# A machine that is gone without a word ends a request within a minute.
_CONNECTION = {"autocommit": True, "connect_timeout": 5, "keepalives_idle": 30, "tcp_user_timeout": 30_000}
# The connection, the disk, a limit; a standby, or a server that a full disk has made one; a transaction that slept.
_AWAY = psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction, psycopg.errors.IdleInTransactionSessionTimeout
# The database does not wait for hours for a pool's machine that is gone in the middle of a transaction.
_OF_LOST_POOLS = "SET idle_in_transaction_session_timeout = '60s'; SET tcp_keepalives_idle = 30"


class PostgresDatabase(Database):
    """A database, by one connection that is made anew once it is lost."""

    def __init__(self, url: str, on_damage: Callable[[ConfigError], None]):
        """Connect, and make the tables if there are none. Raises ConfigError if the database cannot be reached, refuses
        its user, or is another program's."""
        parts = urlsplit(url)
        # The query may have a password too.
        place = parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", "@"), query="").geturl()
        super().__init__("pool_url", place, on_damage)
        self._url = url
        with self._refusals():
            self._connection = self._connect()
        try:
            with self._refusals(), self._connection.transaction():
                self._connection.execute(_LOCKS[ALONE])
                self._make_tables()
        except ConfigError:
            self._connection.close()
            raise

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn the engine's errors into ConfigError."""
        try:
            yield
        except psycopg.Error as error:
            raise unusable(self.setting, one_line(error), "give a database that its user may make tables in") from error

    def _connect(self) -> psycopg.Connection:
        connection = psycopg.connect(self._url, **_CONNECTION)
        connection.execute(_OF_LOST_POOLS)
        (epoch,) = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
        self._offset = epoch - time.monotonic()
        return connection

    def _make_tables(self) -> None:
        if self._connection.execute("SELECT to_regclass('pool_schema')").fetchone() == (None,):
            tables = f"{schema.SCHEMA} {schema.LEASES_SCHEMA}".replace("TEMPORARY", "UNLOGGED")
            tables = tables.replace("INTEGER", "BIGINT").replace("BLOB", "BYTEA")
            self._connection.execute(f"{tables} CREATE TABLE pool_schema AS SELECT {schema.SCHEMA_VERSION} AS version")
        (version,) = self._connection.execute("SELECT version FROM pool_schema").fetchone()
        if version != schema.SCHEMA_VERSION:
            reason = f"it has schema {version}, and this program reads {schema.SCHEMA_VERSION}"
            raise unusable(self.setting, reason, "use the release that made it, or another database")

    def close(self) -> None:
        with self.lock:
            self._connection.close()

    def size(self) -> int:
        return self.row("SELECT pg_database_size(current_database())")[0]

    def now(self) -> float:
        return time.monotonic() + self._offset

    def sql(self, statement: str, *values: Any) -> list[tuple]:
        with self.lock, self._failures():
            if not self._is_in_transaction:  # else the rest of a lost one would be stored
                self._connect_again()
            cursor = self._connection.execute(statement.replace("?", "%s"), values, binary=True)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def _begun(self, kind: str) -> Iterator[None]:
        with self._failures():
            self._connect_again()
            with self._connection.transaction():
                self.sql(_LOCKS[kind])
                yield

    def _connect_again(self) -> None:
        if self._connection.closed:
            self._connection = self._connect()
            log.info("%s is connected again", self.setting)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn the engine's errors into ProtocolError."""
        try:
            yield
        except _AWAY as error:
            message = f"the database of {self.place} does not answer, or cannot store ({one_line(error)})"
            log.error(message)
            raise ProtocolError(503, "no_database", message, retry_after=5) from error
        except psycopg.Error as error:
            raise self._fail(damaged(self.setting, one_line(error))) from error
