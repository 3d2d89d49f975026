"""The process that forks: it has imported the services, and serves callers over a socket."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants

from loadout.demo.adapters import MODEL
from servicekit.rpc import strangers
from tests.support.forks.callers import ADDRESS, engine_name
from tests.support.forks.replaced import (
    fork_engines,
    fork_ranks,
    forked_commands,
    forked_downloads,
)
from tests.support.forks.request import (
    CLI,
    ENGINE,
    EXECUTED_RANKS,
    MAX_FILES,
    RANK,
    WATCHFUL,
    Request,
)
from tests.support.machine.small_volume import enter
from tests.support.workers import share

SWEEP_S, IDLE_SWEEP_S = 0.1, 1.0
CURRENT_TEST = "PYTEST_CURRENT_TEST"
"""pytest's variable with the name and the phase of the test that runs."""
PR_SET_NAME = 15
"""Of Linux's prctl.h."""


class Forker:
    """Forks on request. Answers with the pid, and with the status when the fork ends."""

    def __init__(self, listener: socket.socket, address: str) -> None:
        self._listener = listener
        self._address = address
        self._callers: dict[int, socket.socket] = {}
        """By the pids of forks that run."""
        self._tests: dict[int, str] = {}
        """The test that began each fork."""
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
        self._tests[pid] = request.environment.get(CURRENT_TEST, "")
        if request.ends_with_caller:
            selector.register(caller, selectors.EVENT_READ)
        caller.sendall(pid.to_bytes(4))

    def _reap(self, selector: selectors.BaseSelector) -> None:
        while self._callers:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            share.add_processor_s(self._tests.pop(pid), usage.ru_utime + usage.ru_stime)
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
            strangers.SWEEP_SECONDS = SWEEP_S
            strangers.IDLE_SWEEP_SECONDS = strangers.MAX_SWEEP_SECONDS = IDLE_SWEEP_S
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
        if EXECUTED_RANKS not in os.environ:
            fork_ranks()  # a node begins its own
        return main
    if module == CLI:
        return _run_cli
    if module == RANK:
        return _run_rank
    if module != ENGINE:
        return partial(_run_program, module)
    from inference_svc.engine.transport.process_main import main as engine_main

    def run(arguments: list[str]) -> int:
        ctypes.CDLL(None).prctl(PR_SET_NAME, engine_name(int(arguments[0])).encode())
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


def _run_rank(arguments: list[str]) -> int:
    """Runs the main function of the module that the first argument names."""
    importlib.import_module(arguments[0]).main()
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


def _import(modules: Sequence[str]) -> None:
    """Imports modules. No fork looks for garbage among what is there now, or finalizes it."""
    for each in modules:
        importlib.import_module(each)
    # A fork ends its own objects. Torch's libraries of operators, a third of a fork's time to take
    # apart, end with its memory.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()


def main() -> None:
    import encodings.idna  # of each socket that gets a host's name

    import adapter_store.__main__
    import adapter_store.app
    import inference_svc.__main__
    import inference_svc.app
    import inference_svc.engine.build
    import inference_svc.engine.ranks.main
    import inference_svc.engine.ranks.nodes.main
    import inference_svc.model.gguf.expand
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
    del adapter_store, encodings, inference_svc
    _import([])
    descriptor, address = int(sys.argv[1]), sys.argv[2]
    Forker(socket.socket(fileno=descriptor), address).serve()
