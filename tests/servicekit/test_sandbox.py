"""Sandboxed processes: their limits, what they inherit, and how each of their ends is reported."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from adapter_store.checkpoint import text_files, unpickle
from inference_svc.text import template_process
from servicekit.sandbox import process as sandbox
from servicekit.sandbox.pool import SandboxPool
from servicekit.sandbox.process import Limits, SandboxFailure, SandboxProcess, Task, ask_once
from servicekit.shared_memory import SharedMemory
from tests.support.wait import until

pytestmark = pytest.mark.processes

LIMITS = Limits(memory_bytes=64 << 20, wall_seconds=30.0)
MAX_BYTES = 4 << 20
OURS = {"contract", "servicekit", "adapter_store", "inference_svc", "kernels", "loadout"}
TASKS = {
    "pickles": unpickle.TASK,
    "texts": text_files.TASK,
    "templates": template_process.TASK,
}
"""All that use a sandbox. One that is added belongs here."""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Task]:
    def make(answer: str, before: str = "", **limits: Any) -> Task:
        """Returns a task: `before` runs when it is loaded, `answer` is the content of an answer."""
        program = tmp_path / "program.py"
        program.write_text(
            "import json, os, resource, signal, sys, time\n"
            f"{before}\n"
            "def answer(request):\n"
            f"    return b'A', str({answer})\n"
        )
        return Task(program, replace(LIMITS, **limits), imports_ours=False)

    return make


@pytest.fixture
def start() -> Iterator[Callable[..., SandboxProcess]]:
    started: list[SandboxProcess] = []

    def start(task: Task, **options: Any) -> SandboxProcess:
        started.append(SandboxProcess(task, **options))
        return started[-1]

    yield start
    for process in started:
        process.end()


def ask(task: Task, **request: Any) -> str:
    return ask_once(task, request, MAX_BYTES).text


def failure(task: Task, **request: Any) -> SandboxFailure:
    with pytest.raises(SandboxFailure) as caught:
        ask_once(task, request, MAX_BYTES)
    return caught.value


Make = Callable[..., Task]
Start = Callable[..., SandboxProcess]


# Requests and answers.


def test_a_process_answers_one_request_after_the_other(make: Make, start: Start) -> None:
    process = start(make("seen.append(request['a']) or seen", "seen = []"))
    assert process.ask({"a": 1}, 100) == (b"A", b"[1]")
    assert process.ask({"a": "é"}, 100).text == "[1, 'é']"
    assert process.is_running
    process.end()
    assert not process.is_running
    assert not psutil.pid_exists(process.pid)
    process.end()


def test_bytes_are_requests_as_they_are(make: Make) -> None:
    data = bytes(range(256)) * 1000
    answer = ask_once(make("request == bytes(range(256)) * 1000"), data, MAX_BYTES)
    assert answer.text == "True"


def test_an_answer_can_be_taken_later(make: Make, start: Start) -> None:
    """In parts, by whoever waits for it first; requests of more than a page are not sent so."""
    task = make("time.sleep(0.3) or 'x' * request['size']", before="import time")
    process = start(task)
    assert process.send_at_once({"size": 1 << 19})
    assert process.take_answer(1 << 20, 0.0) is None
    assert process.receive(1 << 20).text == "x" * (1 << 19)
    assert process.send_at_once({"size": 3})
    found: list[sandbox.Answer | None] = []
    until(lambda: found.append(process.take_answer(100, 0.01)) or found[-1], 60)
    assert found[-1] == sandbox.Answer(b"A", b"xxx")
    assert len(found) > 1
    assert not process.send_at_once(bytes(1 << 16))


@pytest.mark.parametrize("answer", ["os._exit(3)", "'x' * 101"])
def test_an_answer_that_fails_is_none_and_is_raised_to_who_waits(
    make: Make, start: Start, answer: str
) -> None:
    process = start(make(answer))
    assert process.send_at_once({})
    assert process.take_answer(100, 30.0) is None
    with pytest.raises(SandboxFailure, match=r"exit code 3|too long"):
        process.receive(100)
    if process.is_running:
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: not process.is_running)
    assert not process.send_at_once({})


def test_it_inherits_the_memory_that_it_is_given_and_no_other(make: Make, start: Start) -> None:
    given, other = SharedMemory("given", 100), SharedMemory("other", 100)
    task = make("mmap.mmap(request['file'], 0).write(b'content')", before="import mmap")
    process = start(task, memory=given)
    assert process.ask({"file": given.file}, 100).text == "7"
    assert bytes(given.view[:8]) == b"content\0"
    with pytest.raises(SandboxFailure):
        process.ask({"file": other.file}, 100)


def test_each_process_of_a_pool_has_a_memory_of_its_own(make: Make) -> None:
    write = "mmap.mmap(request['file'], 0).write(request['text'].encode())"
    pool = SandboxPool(make(write, before="import mmap"), 2, memory_bytes=100)
    with pool.process() as one, pool.process() as other:
        for process, text in ((one, "one"), (other, "other")):
            assert process.memory is not None
            process.ask({"file": process.memory.file, "text": text}, 100)
        assert one.memory is not None
        assert other.memory is not None
        assert bytes(one.memory.view[:6]) == b"one\0\0\0"
        assert bytes(other.memory.view[:6]) == b"other\0"
    pool.close()


def test_the_memory_of_a_process_is_zeros_for_each_caller(make: Make) -> None:
    """Where it cannot be cleared the process ends, and the caller has its answer all the same."""
    write = "mmap.mmap(request['file'], 0).write(b'secret')"
    pool = SandboxPool(make(write, before="import mmap"), 1, memory_bytes=100)
    pids = set()
    for _ in range(2):
        with pool.process() as process:
            assert process.memory is not None
            assert not any(process.memory.view)
            process.ask({"file": process.memory.file}, 100)
            pids.add(process.pid)
            assert bytes(process.memory.view[:6]) == b"secret"
        assert not any(process.memory.view)
    assert len(pids) == 1
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with pool.process():
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, usual[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert pool.idle == ()
    pool.close()


def test_messages_may_be_longer_than_a_pipe(make: Make) -> None:
    text = "x" * (1 << 20)
    assert ask(make("request['text'] * 3"), text=text) == text * 3


def test_an_answer_is_not_read_beyond_its_limit(make: Make) -> None:
    task = make("'x' * request['size']")
    assert len(ask_once(task, {"size": 100}, 100).content) == 100
    with pytest.raises(SandboxFailure, match="too long"):
        ask_once(task, {"size": 101}, 100)


def test_nothing_that_is_printed_is_an_answer(make: Make) -> None:
    printed = "print('a', flush=True), os.write(1, b'b'), os.system('echo c')"
    assert ask(make(f"({printed})[1:]", before=printed)) == "(1, 0)"


def test_pipes_may_have_any_number(make: Make, start: Start) -> None:
    """select() takes files below 1024 only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        assert max(files) >= 1024
        assert start(make("1 + 1")).ask({}, 100).content == b"2"
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# What it has.


def test_it_inherits_no_secret_no_file_and_no_folder(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    secret = os.open(tmp_path / "secret", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(secret, True)
    try:
        seen = "sorted(os.environ), os.getcwd(), sorted(os.listdir('/proc/self/fd')), sys.path"
        names, folder, files, path = eval(ask(make(f"({seen})")))
    finally:
        os.close(secret)
    assert set(names) - {"LC_CTYPE"} == {"LC_ALL", "OMP_NUM_THREADS", "PATH"}
    assert folder == "/"
    # Standard input, output and errors, the answers, and the list of these files.
    assert files == ["0", "1", "2", "3", "4"]
    assert not {str(tmp_path), str(sandbox.ROOT), str(sandbox.PROGRAM.parent), ""} & set(path)


def test_a_session_of_its_own(make: Make) -> None:
    session, pid = eval(ask(make("(os.getsid(0), os.getpid())")))
    assert session == pid != os.getsid(0)


def test_a_task_finds_our_packages_if_it_may(make: Make) -> None:
    first = "(sys.path[0], len(sys.path))"
    without, with_ours = make(first), replace(make(first), imports_ours=True)
    folder, number = eval(ask(with_ours))
    assert folder == str(sandbox.ROOT)
    assert (Path(folder) / "servicekit" / "sandbox").is_dir()
    assert eval(ask(without))[1] == number - 1


# Limits.

READ_LIMITS = """
def read_limits():
    names = ("AS", "FSIZE", "CORE", "NOFILE", "CPU")
    found = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in names}
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file.read().splitlines())
    found["new_privileges"] = status["NoNewPrivs"].strip() != "1"
    with open("/proc/self/statm") as file:
        found["used"] = int(file.read().split()[0]) * resource.getpagesize()
    return found
at_load = read_limits()
"""


def test_limits_are_set_after_loading_and_before_the_first_request(make: Make) -> None:
    task = make(
        "[at_load, read_limits()]",
        READ_LIMITS,
        memory_bytes=50 << 20,
        cpu_seconds=9,
        file_bytes=123,
        open_files=17,
    )
    before, after = eval(ask(task))
    own = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in ("AS", "CPU")}
    assert (before["AS"], before["CPU"], before["new_privileges"]) == (*own.values(), True)
    assert not after["new_privileges"]
    assert after["FSIZE"] == (123, 123)
    assert after["CORE"] == (0, 0)
    assert after["NOFILE"] == (17, 17)
    assert after["CPU"] in ((10, 11), (11, 12)), "beside the processor time of loading"
    soft, hard = after["AS"]
    assert soft == hard
    assert before["used"] <= soft - (50 << 20) <= after["used"]


def test_limits_that_include_loading(make: Make) -> None:
    task = make(
        "read_limits()",
        READ_LIMITS + "bytes(20 << 20)",
        memory_bytes=512 << 20,
        cpu_seconds=9,
        includes_loading=True,
    )
    after = eval(ask(task))
    assert after["AS"] == (512 << 20, 512 << 20)
    assert after["CPU"] == (9, 10)


def test_without_a_limit_of_processor_time(make: Make) -> None:
    assert eval(ask(make("read_limits()", READ_LIMITS)))["CPU"] == resource.getrlimit(
        resource.RLIMIT_CPU
    )


def test_every_limit_is_applied() -> None:
    """A field that the program of the process does not read would limit nothing."""
    program = sandbox.PROGRAM.read_text()
    by_starter = {"wall_seconds", "answer_cpu_seconds"}
    names = set(asdict(LIMITS)) - by_starter
    assert {name for name in names if f'limits["{name}"]' in program} == names


@pytest.mark.parametrize(
    ("answer", "limits", "message"),
    [
        ("len(bytearray(65 << 20))", {}, "exit code 1"),
        ("exec('while True: pass')", {"cpu_seconds": 1}, "more CPU time than it may take"),
        (
            "exec('while True: pass')",
            {"answer_cpu_seconds": 0.3},
            "more CPU time than it may take",
        ),
        ("time.sleep(1000)", {"wall_seconds": 0.5}, "over 0.5 s"),
        ("open(request['path'], 'wb').write(b'x' * 99_999)", {"file_bytes": 1000}, "exit code 1"),
        ("[os.dup(0) for _ in range(20)]", {"open_files": 16}, "exit code 1"),
    ],
)
def test_what_is_over_a_limit_is_ended(
    make: Make, tmp_path: Path, answer: str, limits: dict[str, Any], message: str
) -> None:
    found = failure(make(answer, **limits), path=str(tmp_path / "written"))
    assert str(found) == message
    assert found.is_timeout == (message != "exit code 1")
    assert found.is_own_work == ("CPU time" in message)


@pytest.mark.parametrize(
    ("answer", "limits"),
    [
        ("len(bytearray(40 << 20))", {}),
        ("open(request['path'], 'wb').write(b'x' * 1000)", {"file_bytes": 1000}),
        ("len([os.dup(0) for _ in range(10)])", {"open_files": 16}),
    ],
)
def test_what_is_within_its_limits_is_answered(
    make: Make, tmp_path: Path, answer: str, limits: dict[str, Any]
) -> None:
    assert int(ask(make(answer, **limits), path=str(tmp_path / "written"))) > 0


SPIN = """
def spin(seconds):
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass
    return seconds
"""


def test_each_answer_has_processor_time_of_its_own(make: Make, start: Start) -> None:
    """All of them together take more than one may."""
    process = start(make("spin(0.4)", SPIN, answer_cpu_seconds=1.0))
    for count in range(1, 5):
        assert process.ask({}, MAX_BYTES).text == "0.4"
        assert process.cpu_seconds >= 0.4 * count
    process.end()
    assert process.cpu_seconds >= 1.6, "also when it has ended"


def test_only_turns_on_a_processor_count(make: Make) -> None:
    assert ask(make("time.sleep(1.0)", answer_cpu_seconds=0.9)) == "None"


# How it ends.


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("os._exit(3)", "exit code 3"),
        ("os._exit(0)", "it gave no answer"),
        ("1 / 0", "exit code 1"),
        ("(os.write(3, b'A\\0\\0\\0\\x02x'), os._exit(0))", "it gave no answer"),
        ("(os.write(3, b'A\\0'), os._exit(0))", "it gave no answer"),
        ("os.write(3, b'A\\xff\\xff\\xff\\xff')", "its answer is too long"),
    ],
)
def test_each_end_has_its_message(make: Make, answer: str, message: str) -> None:
    found = failure(make(answer))
    assert (str(found), found.is_timeout) == (message, False)


def test_a_task_that_cannot_be_loaded(make: Make) -> None:
    assert str(failure(make("1", "import nothing_of_this_name"))) == "exit code 1"


def test_a_request_to_a_process_that_has_ended(make: Make, start: Start) -> None:
    process = start(make("1"))
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not process.is_running)
    with pytest.raises(SandboxFailure, match="signal 9"):
        process.ask({"text": "x" * (1 << 20)}, 100)


def test_a_process_that_closes_its_pipes_and_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "END_SECONDS", 0.1)
    task = make("(os.close(3), time.sleep(1000))")
    start_s = time.monotonic()
    assert str(failure(task)) == "it gave no answer"
    assert time.monotonic() - start_s < 20


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_process_that_stands_still(make: Make, start: Start, size: int) -> None:
    """The time is limited, whether it does not answer or does not even read the request."""
    process = start(make("1", wall_seconds=0.5))
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(SandboxFailure, match=r"over 0\.5 s") as caught:
        process.ask({"text": "x" * size}, 100)
    assert caught.value.is_timeout


def test_a_process_that_answers_byte_by_byte(make: Make) -> None:
    drip = "os.write(3, b'A\\0\\0\\x10\\0') and [os.write(3, b'x') for _ in iter(int, 1)"
    found = failure(make(f"{drip} if not time.sleep(0.01)]", wall_seconds=0.5))
    assert str(found) == "over 0.5 s"


def test_the_caller_may_lose_interest(make: Make, tmp_path: Path) -> None:
    class Left(Exception):
        pass

    pid_file = tmp_path / "pid"

    def check_cancelled() -> None:
        if pid_file.exists():
            raise Left

    write = f"open({str(pid_file)!r}, 'w').write(str(os.getpid())) and time.sleep(1000)"
    with pytest.raises(Left):
        ask_once(make(write, file_bytes=100), {}, 100, check_cancelled)
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_processes_that_it_has_started_end_with_it(make: Make) -> None:
    pid = int(ask(make("os.fork() or time.sleep(1000)")))
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


@pytest.mark.parametrize("ends_with_starter", [True, False])
def test_it_may_end_with_the_thread_that_started_it(
    make: Make, start: Start, ends_with_starter: bool
) -> None:
    made: list[SandboxProcess] = []

    def begin() -> None:
        made.append(start(make("os.getpid()"), ends_with_starter=ends_with_starter))
        assert int(made[0].ask({}, 100).text) == made[0].pid

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    # Python's thread ends before the system's.
    until(lambda: thread.native_id not in {each.id for each in psutil.Process().threads()})
    [process] = made
    if ends_with_starter:
        until(lambda: not process.is_running)
    else:
        assert int(process.ask({}, 100).text) == process.pid


def test_it_ends_when_nobody_can_ask_it(make: Make, start: Start) -> None:
    """As when the service is gone: the system closes its pipes."""
    process = start(make("os.getpid()"))
    process.ask({}, 100)
    process._stdin.close()
    until(lambda: not process.is_running)


# The tasks.

LOADED = """
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

inner = sys.modules["inner"] = ModuleType("inner")
SourceFileLoader("inner", {program!r}).exec_module(inner)

def answer(request):
    return b"A", " ".join(sys.modules).encode()
"""
MAY_LOAD = {
    "pickles": {"torch", "numpy"},
    "texts": {"adapter_store", "contract", "servicekit"},
    "templates": {"inference_svc", "servicekit", "jinja2"},
}
"""Which of our packages and of large libraries each task loads: a process starts in the time that
this takes, and has all of it in its memory."""
COUNTED = {*OURS, "torch", "numpy", "jinja2", "grpc", "google", "safetensors", "transformers"}


@pytest.mark.parametrize("name", TASKS)
def test_tasks_load_no_more_than_they_need(name: str, tmp_path: Path) -> None:
    program = tmp_path / "loaded.py"
    program.write_text(LOADED.format(program=str(TASKS[name].program)))
    loaded = ask(replace(TASKS[name], program=program)).split()
    assert {module.split(".")[0] for module in loaded} & COUNTED == MAY_LOAD[name]
    assert not {"servicekit.sandbox", "servicekit.settings", "adapter_store.config"} & {*loaded}


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_limited(name: str) -> None:
    """A limit of a task may shrink, and grow only where docs/security.md says so."""
    limits = TASKS[name].limits
    most = {
        "pickles": Limits(256 << 20, 300.0, 120, 16 << 20, 32),
        "texts": Limits(1 << 30, 60.0, 30, 0, 32, includes_loading=True),
        "templates": Limits(256 << 20, 30.0, None, 0, 16),
    }
    assert limits == most[name]
    assert TASKS[name].imports_ours == (name != "pickles"), "a pickle is a program"
