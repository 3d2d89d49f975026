"""The database under the catalog: SQLite in a file, or PostgreSQL that several replicas share.

`read` is one snapshot. Writes run one at a time: SQLite begins them IMMEDIATE, PostgreSQL locks the
one row of `history` first. So rows that a write has read cannot change before it commits, in either
database, by any other thread or replica.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    InterfaceError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from adapter_store.catalog.tables.schema import history
from adapter_store.errors import CatalogUnavailable, CorruptData, DiskFull, disk_full
from servicekit.errors import FailedPrecondition, ServiceError

SQLITE_BUSY_SECONDS = 30
CONNECT_SECONDS = 5
LOCK_WAIT_SECONDS = 10
STATEMENT_SECONDS = 30
SILENCE_SECONDS = 10
"""A database whose machine has failed is noticed after about this time."""
CANCEL_AGAIN_SECONDS = 0.05
"""After this time a statement is cancelled again: between two statements a cancel has no effect."""
POOL_SIZE = 16
_READ_ONLY = "25006"
_MIGRATION_LOCK = 0x10AD007

P = ParamSpec("P")
T = TypeVar("T")

Place = Path | str
"""A file for SQLite, or the address of a PostgreSQL database."""


class Space(Protocol):
    """The volume that a database in a file lies on."""

    def make_room(self, *, is_large: bool = False) -> None:
        """Frees space for a write, if there is too little: for a few rows, or for a thousand."""

    def check_space(self, num_bytes: int) -> None:
        """Raises DiskFull unless so many bytes can be added."""


class _EndlessSpace:
    def make_room(self, *, is_large: bool = False) -> None: ...
    def check_space(self, num_bytes: int) -> None: ...


ENDLESS = _EndlessSpace()
"""A volume that is never full."""


class Database(Protocol):
    """Thread-safe. Every method raises CatalogUnavailable while the database does not answer."""

    engine: Engine
    is_shared: bool
    """Whether other processes may change it."""

    def read(self) -> AbstractContextManager[Connection]: ...

    def write(self, *, is_large: bool = False) -> AbstractContextManager[Connection]:
        """Opens a transaction, which changes a few rows, or many."""

    def check(self) -> None:
        """Raises CorruptData, naming the file, if it is damaged."""

    def check_space(self, num_bytes: int) -> None:
        """Raises DiskFull if so many bytes would fill a volume of this store's own."""

    def migrating(self) -> AbstractContextManager[Connection]:
        """Opens a transaction that changes tables, exclusive among all processes."""

    def close(self) -> None: ...


def open_database(place: Place, space: Space) -> Database:
    return SqliteDatabase(place, space) if isinstance(place, Path) else PostgresDatabase(place)


def in_batches(database: Database, forget: Callable[[Connection], int]) -> int:
    """Repeats a change, in a transaction each, until it finds nothing; returns how much it has
    found. One transaction for all could take more than a full volume has left."""
    num_found, found = 0, 1
    while found:
        with database.write(is_large=num_found > 0) as conn:
            found = forget(conn)
        num_found += found
    return num_found


class Interrupt:
    """Ends one caller's reads from the database, once that caller has left."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_set = False
        self._cancel: Callable[[], None] | None = None

    def set(self) -> bool:
        """Ends the statements that would follow. Returns whether one may run now: then call
        `cancel`, in another thread."""
        with self._changed:
            self._is_set = True
            return self._cancel is not None

    def cancel(self) -> None:
        """Ends the statement that runs now, and returns when it has ended. Blocks."""
        with self._changed:
            while self._cancel is not None:
                self._cancel()
                self._changed.wait(CANCEL_AGAIN_SECONDS)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns function(*args), whose reading may be ended. Raises also CatalogUnavailable if it
        is."""
        token = _INTERRUPT.set(self)
        try:
            return function(*args, **kwargs)
        finally:
            _INTERRUPT.reset(token)

    @contextmanager
    def attached(self, conn: Connection) -> Iterator[None]:
        """Ends statements of this connection while the context lasts. Raises CatalogUnavailable if
        the caller has left already."""
        driver = cast(Any, conn.connection.driver_connection)
        with self._changed:
            if self._is_set:
                raise CatalogUnavailable("the caller has left")
            self._cancel = driver.cancel if is_postgres(conn) else driver.interrupt
        try:
            yield
        finally:
            # The connection is somebody else's from now on.
            with self._changed:
                self._cancel = None
                self._changed.notify_all()


_INTERRUPT: ContextVar[Interrupt | None] = ContextVar("interrupt", default=None)


@contextmanager
def _interruptible(conn: Connection) -> Iterator[None]:
    interrupt = _INTERRUPT.get()
    if interrupt is None:
        yield
    else:
        with interrupt.attached(conn):
            yield


def upsert(conn: Connection, table: Any) -> Any:
    """Returns an insert that can handle a conflict."""
    return postgresql.insert(table) if is_postgres(conn) else sqlite.insert(table)


def is_postgres(conn: Connection) -> bool:
    return conn.dialect.name == "postgresql"


class SqliteDatabase:
    """A durable database (`synchronous=FULL`) with one writer and concurrent readers (WAL)."""

    is_shared = False

    def __init__(self, path: Path, space: Space = ENDLESS) -> None:
        self._path = path
        self._space = space
        self.engine = create_engine(
            f"sqlite:///{path}",
            connect_args={"timeout": SQLITE_BUSY_SECONDS},
            pool_size=POOL_SIZE,
        )
        self._writer = self.engine.execution_options(immediate=True)
        self._lock = threading.Lock()
        event.listen(self.engine, "connect", _configure_sqlite)
        event.listen(self.engine, "begin", _begin_sqlite)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with _translate_sqlite_errors(), self.engine.begin() as conn, _interruptible(conn):
            yield conn

    @contextmanager
    def write(self, *, is_large: bool = False) -> Iterator[Connection]:
        self._space.make_room(is_large=is_large)
        try:
            with _translate_sqlite_errors(), self._lock, self._writer.begin() as conn:
                yield conn
        except DiskFull:  # for the caller's next try
            self._space.make_room(is_large=True)
            raise

    def check(self) -> None:
        """Raises CorruptData for a damaged catalog."""
        try:
            with self.read() as conn:
                found = conn.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
        except DatabaseError as exc:
            found = str(exc.orig)
        if found != "ok":
            raise CorruptData(
                f"{self._path}: the catalog is damaged: {found}; restore it from a backup",
                subject=str(self._path),
            )

    def check_space(self, num_bytes: int) -> None:
        self._space.check_space(num_bytes)

    def migrating(self) -> AbstractContextManager[Connection]:
        return self.write(is_large=True)

    def close(self) -> None:
        self.engine.dispose()


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # the begin event below issues BEGIN
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


class PostgresDatabase:
    """The database at `dsn`, postgresql+psycopg://user:password@host/database. Broken connections
    are replaced: after a restart of the database the next call works again."""

    is_shared = True

    def __init__(self, dsn: str) -> None:
        """Raises FailedPrecondition if the driver is not installed, or the address is not one."""
        try:
            self.engine = self._make_engine(dsn)
        except (ImportError, ArgumentError) as exc:
            raise FailedPrecondition(
                f"--catalog-dsn: {type(exc).__name__}: it needs the extra loadout[postgres] and an "
                "address postgresql+psycopg://USER:PASSWORD@HOST/NAME",
                subject="catalog_dsn",
            ) from None
        event.listen(self.engine, "handle_error", _see_standby)
        self._reader = self.engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )

    @staticmethod
    def _make_engine(dsn: str) -> Engine:
        return create_engine(
            dsn,
            pool_size=POOL_SIZE,
            pool_timeout=LOCK_WAIT_SECONDS,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args={**_CONNECTION, "options": _session_options()},
        )

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with _translate_errors(), self._reader.begin() as conn, _interruptible(conn):
            yield conn

    @contextmanager
    def write(self, *, is_large: bool = False) -> Iterator[Connection]:
        with _translate_errors(), self.engine.begin() as conn:
            conn.execute(select(history.c.revision).with_for_update())
            yield conn

    @contextmanager
    def listen(self, channel: str) -> Iterator[Callable[[float], bool]]:
        """Listens to a channel, on a connection of its own. The yielded function waits for a number
        of seconds and returns whether there was a notification."""
        with _translate_errors():
            pooled = self.engine.raw_connection()
            connection = cast(Any, pooled.driver_connection)
            pooled.detach()
        try:
            with _translate_driver_errors():
                connection.autocommit = True
                connection.execute(f"LISTEN {channel}")
                yield lambda seconds: any(
                    True for _ in connection.notifies(timeout=seconds, stop_after=1)
                )
        finally:
            connection.close()

    def check(self) -> None:
        """Does nothing: the server checks its own files."""

    def check_space(self, num_bytes: int) -> None:
        """Does nothing: the server has volumes of its own."""

    @contextmanager
    def migrating(self) -> Iterator[Connection]:
        with _translate_errors(), self.engine.begin() as conn:
            conn.exec_driver_sql("SET LOCAL lock_timeout = 0")
            conn.exec_driver_sql("SET LOCAL statement_timeout = 0")
            conn.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
            yield conn

    def close(self) -> None:
        self.engine.dispose()


_CONNECTION = {
    # A database of another encoding is converted to and from by its server. One of none, SQL_ASCII,
    # keeps our UTF-8 as it is; the driver would return bytes from it.
    "client_encoding": "utf8",
    "connect_timeout": CONNECT_SECONDS,
    # The limits below are enforced by the server; these are for a server that is gone.
    "tcp_user_timeout": SILENCE_SECONDS * 1000,
    "keepalives_idle": SILENCE_SECONDS // 2,
    "keepalives_interval": 1,
    "keepalives_count": SILENCE_SECONDS // 2,
}


def _see_standby(context: ExceptionContext) -> None:
    """Disconnects from a server that has become read-only: it is no longer the primary."""
    if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY:
        context.is_disconnect = True


def _session_options() -> str:
    """Returns limits by which a replica that hangs loses its locks."""
    limits = {
        "lock_timeout": LOCK_WAIT_SECONDS,
        "statement_timeout": STATEMENT_SECONDS,
        "idle_in_transaction_session_timeout": STATEMENT_SECONDS,
    }
    return " ".join(f"-c {name}={seconds}s" for name, seconds in limits.items())


_SQLITE_FAILS = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
    }
)
"""Errors that a file, the machine or another process may cause; every other one is a bug."""


@contextmanager
def _translate_sqlite_errors() -> Iterator[None]:
    try:
        yield
    except OperationalError as exc:
        error = _sqlite_error(exc)
        if error is None:
            raise
        raise error from exc


def _sqlite_error(error: OperationalError) -> ServiceError | None:
    """Returns None for a bug."""
    code = getattr(error.orig, "sqlite_errorcode", 0)
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE):
        return disk_full()
    return _unavailable(error) if code & 0xFF in _SQLITE_FAILS else None  # without its details


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeout) as exc:
        raise _unavailable(exc) from exc
    except DBAPIError as exc:
        if exc.connection_invalidated:
            raise _unavailable(exc) from exc
        raise


@contextmanager
def _translate_driver_errors() -> Iterator[None]:
    """Translates errors of a connection that is used without SQLAlchemy."""
    import psycopg  # an optional dependency

    try:
        yield
    except psycopg.Error as exc:
        raise _unavailable(exc) from exc


def _unavailable(error: Exception) -> CatalogUnavailable:
    cause = getattr(error, "orig", None) or error
    return CatalogUnavailable(f"the catalog's database does not answer: {type(cause).__name__}")


def now_micros(conn: Connection) -> int:
    """Returns the time of the clock that leases use, which all replicas share."""
    if is_postgres(conn):
        seconds = conn.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())").scalar_one()
        return int(seconds * 1_000_000)
    return time.time_ns() // 1000
