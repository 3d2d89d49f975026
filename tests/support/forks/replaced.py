"""Processes of the product that are forks meanwhile: commands, systems, engines, ranks."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import IO, Any, Self

import pytest

from loadout.cli.local import download, service_code
from loadout.demo import system
from tests.support.forks.callers import Fork, ForkedProcess
from tests.support.forks.request import ENGINE, RANK, Request


@contextlib.contextmanager
def forked_commands() -> Iterator[None]:
    """Commands of the client that run code of the services in a process fork it meanwhile."""
    subprocess_of_forks = SimpleNamespace(
        Popen=ForkedCommand, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_code, "subprocess", subprocess_of_forks)
        yield


@contextlib.contextmanager
def forked_system() -> Iterator[None]:
    """The parts of a `loadout.demo.system.System` that is started meanwhile are forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "Process", ForkedProcess)
        yield


@contextlib.contextmanager
def forked_downloads() -> Iterator[None]:
    """Processes in which the client has a model downloaded are forks meanwhile."""
    subprocess_of_forks = SimpleNamespace(
        run=_run_command, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "subprocess", subprocess_of_forks)
        yield


def _run_command(
    command: Sequence[str], *, stdin: int, stdout: int, text: bool, check: bool
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a command `python -m module arguments`, forked. Its errors are ours."""
    assert list(command[:2]) == [sys.executable, "-m"], command
    assert (stdin, stdout, text, check) == (subprocess.DEVNULL, subprocess.PIPE, True, False)
    request = Request(command[2], command[3:], dict(os.environ), os.getcwd())
    with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out:
        code = Fork(request, (nothing.fileno(), out.fileno(), 2)).wait()
        out.seek(0)
        return subprocess.CompletedProcess(command, code, out.read())


@contextlib.contextmanager
def forked_engines() -> Iterator[None]:
    """Processes of engines that this process begins meanwhile are forks."""
    with pytest.MonkeyPatch.context() as patch:
        fork_engines(patch.setattr)
        yield


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Processes of ranks that engines and nodes of this process begin meanwhile are forks."""
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch.setattr)
        yield


def fork_engines(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Lets services of this process have engines that are forks. Without `set_attribute`, the
    process is a fork itself."""
    from inference_svc.engine.transport import process

    replacement = SimpleNamespace(Popen=_begin_engine, TimeoutExpired=subprocess.TimeoutExpired)
    set_attribute(process, "subprocess", replacement)


def fork_ranks(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Lets engines and nodes of this process have ranks that are forks; see `fork_engines`."""
    from inference_svc.engine.ranks import peers
    from inference_svc.engine.ranks.nodes import node

    replacement = SimpleNamespace(Popen=_begin_rank, TimeoutExpired=subprocess.TimeoutExpired)
    for module in (peers, node):
        set_attribute(module, "subprocess", replacement)
        set_attribute(module, "rank_command", rank_command)


def rank_command(module: str) -> list[str]:
    """Returns the command of a rank whose main function the module has; see `fork_ranks`."""
    return [RANK, module]


class ForkedCommand(Fork):
    """A fork with a pipe for its errors, with what a command uses of `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: IO[str], stderr: int, text: bool
    ) -> None:
        assert list(command[:2]) == [sys.executable, "-m"], command
        assert (stdin, stderr, text) == (subprocess.DEVNULL, subprocess.PIPE, True)
        reading, writing = os.pipe()
        self.stderr = os.fdopen(reading)
        with open(os.devnull) as nothing, open(writing, "wb") as errors:
            request = Request(command[2], command[3:], dict(os.environ), os.getcwd())
            super().__init__(request, (nothing.fileno(), stdout.fileno(), errors.fileno()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stderr.close()
        self.wait()


def _begin_engine(command: Sequence[str], *, stdin: int, process_group: int) -> Fork:
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    environment, folder = dict(os.environ), os.getcwd()
    request = Request(ENGINE, [str(os.getpid())], environment, folder, max_files=max_files)
    return Fork(request, (stdin, 1, 2))


def _begin_rank(command: Sequence[str], *, stdin: int, pass_fds: Sequence[int] = ()) -> Any:
    if command[0] != RANK:  # a test has ranks of its own
        return subprocess.Popen(command, stdin=stdin, pass_fds=pass_fds)
    arguments, environment = list(command[1:]), dict(os.environ)
    request = Request(
        RANK, arguments, environment, os.getcwd(), files=pass_fds, ends_with_caller=True
    )
    return Fork(request, (stdin, 1, 2))
