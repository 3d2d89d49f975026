"""The library compiles for every instruction set, and runs programs on all threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.elementwise import swiglu_op
from kernels.native import build, library
from kernels.native.library import NativeOp, choose
from tests.support.native import native_library


def test_a_program_runs_in_order_and_again_with_other_arguments() -> None:
    loaded = native_library()
    first, second = torch.ones(4, 64), torch.empty(4, 32)
    third, count = torch.empty(4, 16), torch.tensor([4], dtype=torch.int32)
    ops = [
        swiglu_op(*gate_up.chunk(2, dim=1), out, count)
        for gate_up, out in ((first, second), (second, third))
    ]
    program = loaded.program(ops)
    for value in (1.0, 2.0):
        first.fill_(value)
        program.run()
        inner = F.silu(torch.tensor(value)) * value
        torch.testing.assert_close(third, (F.silu(inner) * inner).expand(4, 16))
    profile = program.profile()
    assert [name for name, _ in profile] == ["swiglu_float", "swiglu_float"]
    assert all(seconds > 0 for _, seconds in profile)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are placed on Linux")
def test_threads_stay_where_they_are_placed_and_others_where_they_were() -> None:
    loaded, here = native_library(), os.sched_getaffinity(0)
    first, *others = sorted(here)
    parts = [[first], others or [first]]
    ones = torch.ones(2, 4)
    program = loaded.program([swiglu_op(ones, ones, torch.empty(2, 4), _count(2))])
    placed: list[set[int]] = []

    def work() -> None:
        loaded.place_threads(parts)
        program.run()
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                placed.append(os.sched_getaffinity(int(task)))
        placed.append(os.sched_getaffinity(0))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        program.run()
    finally:
        torch.set_num_threads(before)
    assert placed[-1] == set(parts[0]), "the caller is thread 0"
    assert set(parts[1]) in placed[:-1]
    assert os.sched_getaffinity(0) == here


def _count(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def test_an_unknown_operation_is_refused() -> None:
    class NoArgs(ctypes.Structure):
        _fields_ = ()

    loaded = native_library()
    with pytest.raises(AttributeError, match="loadout_nothing"):
        loaded.program([NativeOp("nothing", NoArgs())])


def test_without_a_compiler_there_is_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.ensure("avx2") is None


@pytest.mark.processes
def test_sources_that_do_not_compile_say_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.cpp").write_text("int broken = nonsense;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    with pytest.raises(build.CompileFailed, match="nonsense"):
        build.ensure("avx2")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where libraries of a tiny source belong; it is not there yet."""
    if build.find_compiler() is None:
        pytest.skip("no compiler for the native kernels")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "empty.cpp").write_text("int nothing;")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    return tmp_path / "lib"


@pytest.mark.processes
def test_a_folder_that_cannot_be_written_is_no_obstacle(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    path = build.ensure("avx2")
    assert path is not None
    assert path.exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("function", "code"), [("fcntl.flock", errno.ENOLCK), ("shutil.copy", errno.ENOSPC)]
)
def test_a_folder_without_locks_or_space_is_no_obstacle(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    module, _, name = function.partition(".")
    intact = getattr(getattr(build, module), name)

    def fail_there(*args: Any) -> Any:
        if module == "fcntl" or Path(args[1]).parent == folder:
            if module == "shutil":
                Path(args[1]).touch()
            raise OSError(code, "refused")
        return intact(*args)

    monkeypatch.setattr(f"kernels.native.build.{function}", fail_there)
    path = build.ensure("avx2")
    assert path is not None
    assert path.exists()
    assert path.parent != folder
    assert [each.name for each in folder.iterdir()] == ["avx2.lock"]


@pytest.mark.processes
def test_a_compiler_that_hangs_is_given_up_with_its_children(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nsleep 60 &\nwait\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "find_compiler", lambda: str(compiler))
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.3)
    started = time.monotonic()
    with pytest.raises(build.CompileFailed, match="not ended"):
        build.ensure("avx2")
    assert time.monotonic() - started < 30


ENSURE = """
import logging, sys
from pathlib import Path
from kernels.native import build
logging.basicConfig(level=logging.INFO)
build.SOURCES, build.LIBRARIES = map(Path, sys.argv[1:])
print(build.ensure("avx2"))
"""


@pytest.mark.processes
def test_two_processes_compile_once(folder: Path) -> None:
    command = [sys.executable, "-c", ENSURE, str(build.SOURCES), str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in processes]
    path = build.library_path("avx2")
    assert [out.strip() for out, _ in said] == [str(path)] * 2
    assert sum(log.count("compiled the native kernels") for _, log in said) == 1
    assert {each.name for each in folder.iterdir()} == {path.name, "avx2.lock"}


def test_other_flags_make_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_path("avx2")
    monkeypatch.setattr(build, "_COMMON_FLAGS", (*build._COMMON_FLAGS, "-g"))
    assert build.library_path("avx2") != before


def test_the_next_best_variant_serves_where_the_best_does_not_compile_or_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best = native_library()
    good = build.library_path(best.variant)
    broken = tmp_path / "broken.so"
    broken.write_text("a library that this machine cannot load")

    def ensure(variant: str) -> Path | None:
        if variant == "refused":
            raise build.CompileFailed("x.cpp: In function f:\nx.cpp:1: error: unrecognized option")
        return {"absent": None, "broken": broken}.get(variant, good)

    monkeypatch.setattr(library, "ensure", ensure)
    variants = ["refused", "absent", "broken"]
    monkeypatch.setattr(library, "runnable_variants", lambda: [*variants, best.variant])
    with caplog.at_level(logging.INFO):
        found, faults = choose.__wrapped__(None)
    assert found is not None
    assert found.variant == best.variant
    assert faults[:2] == ("refused: x.cpp:1: error: unrecognized option", "absent: no compiler")
    assert "broken.so" in faults[2]
    assert "In function" in caplog.text, "all that the compiler said"
    monkeypatch.setattr(library, "runnable_variants", lambda: variants)
    assert choose.__wrapped__(None) == (None, faults)
    monkeypatch.setattr(library, "runnable_variants", list)
    assert choose.__wrapped__(None) == (None, ("none are for this processor",))


def test_the_library_is_chosen_once() -> None:
    """A compiler that fails takes seconds each time."""
    assert library.load() is choose(None).library
    with pytest.raises(TypeError):
        choose()  # type: ignore[call-arg]  # it would be another entry of the cache


def test_an_installation_elsewhere_than_on_x86_compiles_nothing() -> None:
    assert build.installed_variants("aarch64") == []
    assert build.installed_variants("x86_64") == list(build.FLAGS)


def test_a_processor_without_vectors_has_no_variant(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu sse2 avx\n")
    assert build.runnable_variants(tmp_path / "cpuinfo") == []
    (tmp_path / "cpuinfo").write_text("flags : fpu avx2 fma f16c\n")
    assert build.runnable_variants(tmp_path / "cpuinfo") == ["avx2"]
    assert build.processor_flags(tmp_path / "cpuinfo") >= {"fpu", "avx2", "fma", "f16c"}
    assert not build.processor_flags(tmp_path / "absent")
