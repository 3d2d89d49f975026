"""The library compiles for every instruction set, and runs programs on all threads."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kernels.elementwise import swiglu_op
from kernels.native import build, library
from kernels.native.library import NativeOp, load
from tests.native import native_library


def test_a_program_runs_in_order_and_again_with_other_arguments() -> None:
    loaded = native_library()
    first, second = torch.ones(4, 64), torch.empty(4, 32)
    third, count = torch.empty(4, 16), torch.tensor([4], dtype=torch.int32)
    program = loaded.program([swiglu_op(first, second, count), swiglu_op(second, third, count)])
    for value in (1.0, 2.0):
        first.fill_(value)
        program.run()
        inner = F.silu(torch.tensor(value)) * value
        torch.testing.assert_close(third, (F.silu(inner) * inner).expand(4, 16))
    profile = program.profile()
    assert [name for name, _ in profile] == ["swiglu_float", "swiglu_float"]
    assert all(seconds > 0 for _, seconds in profile)


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


def test_sources_that_do_not_compile_say_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.cpp").write_text("int broken = nonsense;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    with pytest.raises(build.CompileFailed, match="nonsense"):
        build.ensure("avx2")


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "empty.cpp").write_text("int nothing;")
    (tmp_path / "lib").write_text("a file where the folder should be")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    path = build.ensure("avx2")
    assert path is not None
    assert path.exists()


def test_the_next_best_variant_serves_where_the_best_does_not_compile_or_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best = native_library()
    good = build.library_path(best.variant)
    broken = tmp_path / "broken.so"
    broken.write_text("a library that this machine cannot load")

    def ensure(variant: str) -> Path | None:
        if variant == "refused":
            raise build.CompileFailed("unrecognized option")
        return {"absent": None, "broken": broken}.get(variant, good)

    monkeypatch.setattr(library, "ensure", ensure)
    variants = ["refused", "absent", "broken"]
    monkeypatch.setattr(library, "runnable_variants", lambda: [*variants, best.variant])
    found = load.__wrapped__()
    assert found is not None
    assert found.variant == best.variant
    assert not caplog.records
    monkeypatch.setattr(library, "runnable_variants", lambda: variants)
    assert load.__wrapped__() is None
    (record,) = caplog.records
    said = record.getMessage()
    for reason in ("unrecognized option", "absent: no compiler", "broken.so"):
        assert reason in said


def test_an_installation_elsewhere_than_on_x86_compiles_nothing() -> None:
    assert build.installed_variants("aarch64") == []
    assert build.installed_variants("x86_64") == list(build.FLAGS)


def test_a_processor_without_vectors_has_no_variant(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu sse2 avx\n")
    assert build.runnable_variants(tmp_path / "cpuinfo") == []
    (tmp_path / "cpuinfo").write_text("flags : fpu avx2 fma f16c\n")
    assert build.runnable_variants(tmp_path / "cpuinfo") == ["avx2"]
