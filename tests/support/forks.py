"""Services and engines as processes that start at once: forks of one that has imported them.

Importing torch and a service takes seconds of processor time, and a run of the tests starts them
hundreds of times. One process imports, for all workers of a run. It forks on request, over a
socket, and reports how each fork ended. Settings, logs, signals and exit codes are the same as with
`python -m`. Only the parent differs: an engine is a child of this process, not of its service.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import math
import os
import resource
import runpy
import select
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Self

import huggingface_hub.constants
import pytest

from loadout.cli.local import download, service_code
from loadout.demo import system
from loadout.demo.adapters import MODEL
from loadout.demo.process import Process
from servicekit.rpc import strangers
from tests.support.machine.small_volume import SmallVolume, enter
from tests.support.workers import share

ADDRESS = share.FORKS
"""Workers of a run share a process that forks by this variable, and forks have engines forked."""
TURN_S = 0.05
WATCHFUL = "LOADOUT_TEST_WATCHFUL=1"
"""The variable of services that strangers attack. Others look at their sockets ten times less
often: fifty looks a second are 2 % of a core, for as long as an idle service is shared by tests."""
IDLE_SWEEP_S = 0.2
ENGINE, RANK = "engine", "rank"
EXECUTED_RANKS = "LOADOUT_TEST_EXECUTED_RANKS"
"""Where this variable is set, engines that are forks start programs as ranks, as elsewhere."""
MAX_FILES = 64
"""The descriptors that travel with a request, at most."""
CLI = "loadout.cli"
FORKED_PROGRAM = Path(__file__).with_name("forked_program.py")
PR_SET_NAME = 15
"""Of Linux's prctl.h."""


@dataclass(frozen=True, slots=True)
class Request:
    """The program of a fork: `python -m module arguments`, a file, or an engine. The descriptors
    of its standard streams travel with it."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    volume_pid: int | None = None
    max_files: int = 1024
    imports: Sequence[str] = ()
    """Modules that the process which forks imports first, for this fork and all later ones."""
    files: Sequence[int] = ()
    """Further descriptors, which have the same numbers in the fork."""
    ends_with_caller: bool = False
    """The fork is killed once nobody can wait for it any more."""


class Fork:
    """A process that was forked, with the methods of `subprocess.Popen`."""

    def __init__(self, request: Request, streams: tuple[int, int, int]) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address())
        socket.send_fds(self._socket, [b"f"], [*streams, *request.files])
        body = json.dumps(asdict(request)).encode()
        self._socket.sendall(len(body).to_bytes(4) + body)
        self.pid = int.from_bytes(self._receive(4))

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        deadline_s = math.inf if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            with self._lock:  # not for long: other threads wait as well
                self._take(max(0.0, min(TURN_S, deadline_s - time.monotonic())))
            if self.returncode is None and time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        return self.returncode

    def _take(self, timeout_s: float) -> None:
        """Takes the status, if it comes in this time."""
        if self.returncode is not None:
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if poll.poll(timeout_s * 1000):
            self.returncode = int.from_bytes(self._receive(4), signed=True)
            self._socket.close()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _receive(self, count: int) -> bytes:
        found = self._socket.recv(count, socket.MSG_WAITALL)
        if len(found) < count:
            raise RuntimeError(f"the process that forks has ended; see its log: {address()}.log")
        return found


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
    """Processes of ranks that engines of this process begin meanwhile are forks."""
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch.setattr)
        yield


def run(
    program: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    imports: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs a module, or a file whose name ends with .py, as `python -m` would, to its end.
    `imports`: see Request."""
    variables = {**os.environ, **(environment or {})}
    with (
        open(os.devnull) as nothing,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as errors,
    ):
        streams = (nothing.fileno(), out.fileno(), errors.fileno())
        request = Request(program, arguments, variables, os.getcwd(), imports=imports)
        code = Fork(request, streams).wait()
        out.seek(0)
        errors.seek(0)
        command = [program, *arguments]
        return subprocess.CompletedProcess(command, code, out.read(), errors.read())


class Piped(Fork):
    """A fork with pipes for its input and output. Its errors are ours."""

    def __init__(self, request: Request) -> None:
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)
        with open(theirs_in, "rb"), open(theirs_out, "wb"):
            super().__init__(request, (theirs_in, theirs_out, 2))


@contextlib.contextmanager
def piped(program: str, *arguments: str) -> Iterator[Piped]:
    """Runs a module while the context lasts. It is to end when its input does."""
    made = Piped(Request(program, arguments, dict(os.environ), os.getcwd()))
    with made.stdout:
        with made.stdin:
            yield made
        made.wait()


class ForkedProcess(Process):
    """`Process` of a command `python -m module arguments`, which `env` may run, forked."""

    def _begin(self, command: Sequence[str]) -> Any:
        first = command.index(sys.executable)
        assert command[first + 1] == "-m", command
        assert list(command[: min(first, 1)]) == ["env"][:first], command
        environment = dict(each.split("=", 1) for each in command[1:first])
        self.log_path.unlink(missing_ok=True)
        module, *arguments = command[first + 2 :]
        return start(module, arguments, self.log_path, environment)


def start(
    module: str,
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    volume: SmallVolume | None = None,
) -> Fork:
    """Runs the main function of a service with its output at the end of `log`. Its environment and
    its limit of open files are this process's as they are now, with further variables. It sees the
    `volume`."""
    variables = {**os.environ, **(environment or {})}
    pid = None if volume is None else volume.pid
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    request = Request(module, list(arguments), variables, os.getcwd(), pid, max_files)
    with log.open("ab", buffering=0) as file, open(os.devnull) as nothing:
        return Fork(request, (nothing.fileno(), file.fileno(), file.fileno()))


def engine_of(service_pid: int) -> int:
    """Returns the pid of the engine of a forked service."""
    if found := engines_of(service_pid):
        return found[0]
    raise AssertionError(f"process {service_pid} has no engine")


def engines_of(service_pid: int) -> list[int]:
    """Returns the pids of engines that are forks, and that this process has begun."""
    name, found = f"{_engine_name(service_pid)}\n", []
    for status in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            if status.read_text() == name:
                found.append(int(status.parent.name))
    return found


def _engine_name(service_pid: int) -> str:
    return f"engine-{service_pid}"


def variables(prefix: str, settings: Mapping[str, object]) -> dict[str, str]:
    """Returns environment variables of settings by their names, with hyphens or underscores."""
    return {
        f"LOADOUT_{prefix}_{name.replace('-', '_').upper()}": str(value)
        for name, value in settings.items()
    }


@cache
def address() -> str:
    """Returns the path of the socket, where a process listens that imports and forks."""
    if found := os.environ.get(ADDRESS):
        return found
    folder = tempfile.mkdtemp(prefix="loadout-forks-")
    listener, address = share.listen(folder)
    with listener:
        process = share.begin(listener, address)
    atexit.register(_end, process, folder)
    return address


@cache
def programs() -> Path:
    """Returns a folder for PATH with a `loadout` that forks run, and the services that it becomes:
    shells start it at once."""
    folder = Path(tempfile.mkdtemp(prefix="loadout-programs-"))
    atexit.register(shutil.rmtree, folder)
    command = [sys.executable, "-ISE", str(FORKED_PROGRAM), address(), CLI]
    (folder / "loadout").write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    (folder / "loadout").chmod(0o700)
    return folder


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    for name in os.listdir(folder):
        os.unlink(f"{folder}/{name}")
    os.rmdir(folder)


# --- the process that forks --------------------------------------------------------------------


class Forker:
    """Forks on request. Answers with the pid, and with the status when the fork ends."""

    def __init__(self, listener: socket.socket, address: str) -> None:
        self._listener = listener
        self._address = address
        self._callers: dict[int, socket.socket] = {}
        """By the pids of forks that run."""
        self._woken, woke = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(woke, False)
        signal.set_wakeup_fd(woke, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        """Serves until standard input ends."""
        with selectors.DefaultSelector() as selector:
            for each in (self._listener.fileno(), self._woken, 0):
                selector.register(each, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if 0 in ready:
                    return
                if self._woken in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                    self._reap(selector)
                if self._listener.fileno() in ready:
                    self._accept(selector)
                for pid, caller in list(self._callers.items()):
                    if caller.fileno() in ready:  # it sends nothing more
                        selector.unregister(caller)
                        os.kill(pid, signal.SIGKILL)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        caller, _ = self._listener.accept()
        _, streams, _, _ = socket.recv_fds(caller, 1, MAX_FILES)
        length = int.from_bytes(caller.recv(4, socket.MSG_WAITALL))
        request = Request(**json.loads(caller.recv(length, socket.MSG_WAITALL)))
        if missing := [each for each in request.imports if each not in sys.modules]:
            _import(missing)
        pid = os.fork()
        if pid == 0:
            _become(request, streams, self._address)
        for each in streams:
            os.close(each)
        self._callers[pid] = caller
        if request.ends_with_caller:
            selector.register(caller, selectors.EVENT_READ)
        caller.sendall(pid.to_bytes(4))

    def _reap(self, selector: selectors.BaseSelector) -> None:
        while self._callers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._callers.pop(pid) as caller, contextlib.suppress(OSError):
                if caller.fileno() in selector.get_map():
                    selector.unregister(caller)
                caller.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, signed=True))


def _become(request: Request, streams: Sequence[int], address: str) -> None:
    """Runs the request in this fork, then ends it."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _place_files(streams, (0, 1, 2, *request.files))
        os.setpgid(0, 0)
        limit = (request.max_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        if request.volume_pid is not None:
            enter(request.volume_pid)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update({**request.environment, ADDRESS: address})
        importlib.reload(huggingface_hub.constants)  # variables, as they were at the import
        if WATCHFUL.partition("=")[0] not in os.environ:
            strangers.IDLE_SWEEP_SECONDS = IDLE_SWEEP_S
        sys.argv[:] = [request.module, *request.arguments]
        status = _main_of(request.module)(list(request.arguments))
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            _finish()
        os._exit(status)


def _place_files(found: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives descriptors these numbers, and closes all others."""
    first_free = max(*numbers, *found) + 1
    for each, number in zip(found, numbers, strict=True):
        os.dup2(each, first_free + number)
    for number in numbers:
        os.dup2(first_free + number, number)
    ends = (*sorted(numbers)[1:], os.sysconf("SC_OPEN_MAX"))
    for number, end in zip(sorted(numbers), ends, strict=True):
        os.closerange(number + 1, end)


def _finish() -> None:
    """Ends threads, runs exit handlers and flushes, as an interpreter does at its exit."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


def _main_of(module: str) -> Callable[[list[str]], int]:
    if module == "adapter_store":
        from adapter_store.__main__ import main

        return main
    if module == "inference_svc":
        from inference_svc.__main__ import main

        fork_engines()
        return main
    if module == CLI:
        return _run_cli
    if module == RANK:
        return _run_rank
    if module != ENGINE:
        return partial(_run_program, module)
    from inference_svc.engine.transport.process_main import main as engine_main

    def run(arguments: list[str]) -> int:
        ctypes.CDLL(None).prctl(PR_SET_NAME, _engine_name(int(arguments[0])).encode())
        if EXECUTED_RANKS not in os.environ:
            fork_ranks()
        engine_main()
        return 0

    return run


def _run_cli(arguments: list[str]) -> int:
    """Runs the command line. A service that it would become runs here, in the same process."""
    from loadout.cli.__main__ import main
    from loadout.cli.local import services

    def become(program: str, command: Sequence[str]) -> None:
        sys.argv[:] = command[2:]
        raise SystemExit(_main_of(command[2])(list(command[3:])))

    setattr(services, "os", SimpleNamespace(execv=become))  # noqa: B010 - as above
    with forked_commands(), forked_downloads():
        return main(arguments)


def fork_engines(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Lets services of this process have engines that are forks. Without `set_attribute`, the
    process is a fork itself."""
    from inference_svc.engine.transport import process

    replacement = SimpleNamespace(Popen=_begin_engine, TimeoutExpired=subprocess.TimeoutExpired)
    set_attribute(process, "subprocess", replacement)


def fork_ranks(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Lets engines of this process have ranks that are forks; see `fork_engines`."""
    from inference_svc.engine.ranks import peers

    replacement = SimpleNamespace(Popen=_begin_rank, TimeoutExpired=subprocess.TimeoutExpired)
    set_attribute(peers, "subprocess", replacement)
    set_attribute(peers, "rank_command", lambda module: [RANK])


def _run_rank(arguments: list[str]) -> int:
    from inference_svc.engine.ranks.main import main as rank_main

    rank_main()
    return 0


def _run_program(program: str, arguments: list[str]) -> int:
    """Runs a file or a module, which finds its arguments in `sys.argv`, with one thread of torch,
    as in the process of the tests."""
    import torch

    torch.set_num_threads(1)
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__")
    return 0


def _begin_engine(command: Sequence[str], *, stdin: int, process_group: int) -> Fork:
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    environment, folder = dict(os.environ), os.getcwd()
    request = Request(ENGINE, [str(os.getpid())], environment, folder, max_files=max_files)
    return Fork(request, (stdin, 1, 2))


def _begin_rank(command: Sequence[str], *, stdin: int, pass_fds: Sequence[int]) -> Any:
    if list(command) != [RANK]:  # a test has ranks of its own
        return subprocess.Popen(command, stdin=stdin, pass_fds=pass_fds)
    request = Request(
        RANK, [], dict(os.environ), os.getcwd(), files=pass_fds, ends_with_caller=True
    )
    return Fork(request, (stdin, 1, 2))


def _import(modules: Sequence[str]) -> None:
    """Imports modules. No fork looks for garbage among what is there now."""
    for each in modules:
        importlib.import_module(each)
    gc.collect()
    gc.freeze()


def main() -> None:
    import adapter_store.app
    import inference_svc.app
    import inference_svc.engine.build
    import inference_svc.engine.ranks.main
    from adapter_store.catalog.catalog import Catalog
    from inference_svc.model.architectures import families
    from inference_svc.text.tokenizer import Tokenizer
    from loadout.cli.__main__ import command

    # What is imported when it is first used: hundreds of modules.
    Tokenizer(MODEL)
    command()
    families()
    with tempfile.TemporaryDirectory() as folder:
        Catalog(Path(folder, "catalog.sqlite3"), event_retention=1).close()
    del adapter_store, inference_svc
    _import([])
    descriptor, address = int(sys.argv[1]), sys.argv[2]
    Forker(socket.socket(fileno=descriptor), address).serve()


if __name__ == "__main__":
    main()
