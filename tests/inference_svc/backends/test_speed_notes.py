"""Notes for operators on the speed of a machine, as functions of facts, and on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.backends import torch
from inference_svc.backends.native import backend as native
from inference_svc.backends.native.backend import NativeFactory
from inference_svc.backends.speed_notes import (
    device_notes,
    native_notes,
    thread_notes,
    torch_notes,
)
from inference_svc.backends.torch import TorchFactory
from inference_svc.core import EngineConfig
from inference_svc.host.cpus import compute_threads, usable_cores, usable_cpus
from kernels import tuning
from kernels.native.library import Choice
from kernels.native.tile_permission import REFUSED
from tests.support.machine.fake_machines import FakeMachine, fake_machines
from tests.support.native import native_library

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
BF16 = AVX512 | {"avx512_bf16"}
AMX = BF16 | {"amx_tile", "amx_int8", "amx_bf16"}


@pytest.mark.parametrize(
    ("flags", "variant", "dtype", "expected"),
    [
        (BF16, "avx512_bf16", "bfloat16", None),
        (AMX, "amx_bf16", "bfloat16", None),
        (BF16, "avx512_bf16", "float32", "--dtype bfloat16 is faster"),
        (AMX, "amx_bf16", "float32", "--dtype bfloat16 is faster"),
        (AVX512, "avx512", "float32", None),
        (AVX512, "avx512", "bfloat16", "no instructions for bfloat16"),
        (AVX2, "avx2", "float32", None),
        (AVX2, "avx2", "bfloat16", "no instructions for bfloat16"),
    ],
)
def test_notes_on_native_kernels(
    flags: set[str], variant: str, dtype: str, expected: str | None
) -> None:
    notes = native_notes(dtype, variant, flags, ())
    assert len(notes) == (expected is not None)
    assert expected is None or expected in notes[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_better_library_that_is_missing_is_the_only_note(dtype: str) -> None:
    """The processor has what its library would use."""
    [note] = native_notes(dtype, "avx2", AMX, ("avx512_bf16: no compiler", "avx512: no compiler"))
    assert "kernels for avx2 compute" in note
    assert "(avx512_bf16: no compiler; avx512: no compiler): install a newer g++" in note


def test_a_system_that_refuses_tiles_is_named() -> None:
    """A newer compiler would not help."""
    [note] = native_notes("bfloat16", "avx512_bf16", AMX, (f"amx_bf16: {REFUSED}: no",))
    assert "kernels for avx512_bf16 compute" in note
    assert f"(amx_bf16: {REFUSED}: no): run on Linux 5.16 or newer" in note
    [note] = native_notes("float32", "avx512_bf16", AMX, (f"amx_bf16: {REFUSED}: no",))
    assert note.startswith("float32 has twice the bytes"), "tiles would not multiply it"


@pytest.mark.parametrize(
    ("threads", "cores", "cpus", "expected"),
    [
        (2, 2, 2, ""),
        (4, 4, 8, ""),
        (1, 1, 1, ""),
        (1, 8, 8, "1 thread computes, and this process may use 8 cores: with --num-threads 8"),
        (3, 4, 8, "3 threads compute, and this process may use 4 cores: with --num-threads 4"),
        (9, 4, 8, "9 threads compute, and this process may use 8 processors: threads that share"),
        (2, 1, 1, "2 threads compute, and this process may use 1 processor: threads that share"),
        (8, 4, 8, "8 threads compute, and this process may use 4 cores with 8 processors: two"),
        (5, 4, 8, "5 threads compute, and this process may use 4 cores with 8 processors: two"),
        (2, 1, 2, "2 threads compute, and this process may use 1 core with 2 processors: two"),
    ],
)
def test_notes_on_threads(threads: int, cores: int, cpus: int, expected: str) -> None:
    """One thread for each core is right; more than one may be."""
    notes = thread_notes(threads, cores, cpus)
    assert len(notes) == bool(expected)
    assert all(note.startswith(expected) for note in notes)
    assert all(f"--num-threads {cores}" in note for note in notes)
    assert all(("measure if" in note) == (cores < threads <= cpus) for note in notes)


@pytest.mark.parametrize(
    ("threads", "ranks", "expected"),
    [
        (1, 2, "2 ranks of 1 thread compute, and this process may use 8 cores: with"),
        (4, 2, ""),
        (2, 3, ""),
        (1, 9, ""),
        (8, 2, "2 ranks of 8 threads compute, and this process may use 8 cores with 16"),
        (9, 2, "2 ranks of 9 threads compute, and this process may use 16 processors"),
    ],
)
def test_notes_on_threads_of_ranks(threads: int, ranks: int, expected: str) -> None:
    """Eight cores, each with two processors, are divided among ranks."""
    notes = thread_notes(threads, 8, 16, ranks)
    assert len(notes) == bool(expected)
    assert all(note.startswith(expected) for note in notes)
    assert all(f"--num-threads {max(1, 8 // ranks)}" in note for note in notes)


@given(fake_machines(), st.integers(1, 20))
def test_no_machine_has_a_note_on_threads_by_default(machine: FakeMachine, ranks: int) -> None:
    with machine.files() as root:
        threads = compute_threads(0, ranks, root)
        assert thread_notes(threads, usable_cores(root), usable_cpus(root), ranks) == []


@pytest.mark.parametrize(
    ("dtype", "is_chosen", "faults", "expected"),
    [
        ("bfloat16", True, (), "native-kernels is false: set it to true"),
        ("float16", False, (), "they do not compute float16: set --dtype bfloat16 or float32"),
        ("float32", False, ("none are for this processor",), "none are for this processor"),
        (
            "float32",
            False,
            ("avx512: error: bad option", "avx2: no compiler"),
            "avx512: error: bad option; avx2: no compiler: install g++, and the next start compiles"
            " them",
        ),
    ],
)
def test_notes_on_torch(
    dtype: str, is_chosen: bool, faults: tuple[str, ...], expected: str
) -> None:
    [note] = torch_notes(dtype, is_chosen=is_chosen, faults=faults)
    assert note == f"torch computes, which is slower than the native kernels: {expected}"


def test_notes_on_devices() -> None:
    measured = tuning.measured_devices()
    assert measured == ["NVIDIA H200"]
    assert device_notes("NVIDIA H200", (9, 0), measured) == []
    [note] = device_notes("NVIDIA H100 80GB HBM3", (9, 0), measured)
    assert "none were measured on NVIDIA H100 80GB HBM3, only on NVIDIA H200: " in note
    old, _ = device_notes("Tesla T4", (7, 5), measured)
    assert "Tesla T4 has compute capability 7.5, and the kernels are made for 8.0" in old
    assert all(tuning.path_of(name).is_file() for name in measured)


@pytest.mark.parametrize("threads", [1, 2])
def test_this_machine(threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each factory finds the facts by itself."""
    library = native_library()
    for module in (native, torch):
        monkeypatch.setattr(module, "usable_cores", lambda: 2)
        monkeypatch.setattr(module, "usable_cpus", lambda: 2)
    monkeypatch.setattr(native, "processor_flags", lambda: frozenset(AMX))
    monkeypatch.setattr(native, "choose", lambda _: Choice(library, ("best: no compiler",)))
    monkeypatch.setattr(torch, "choose", lambda _: Choice(None, ("best: no compiler",)))
    config = EngineConfig(tmp_path, "m", dtype="bfloat16")
    of_threads = thread_notes(threads, 2, 2)
    faults = ("best: no compiler",)
    expected = native_notes("bfloat16", library.variant, AMX, faults) + of_threads
    assert NativeFactory().speed_notes(config, threads) == expected
    expected = torch_notes("bfloat16", is_chosen=False, faults=faults) + of_threads
    assert TorchFactory().speed_notes(config, threads) == expected
    config = replace(config, tensor_parallel=2)
    of_ranks = thread_notes(threads, 2, 2, num_ranks=2)
    for factory in (NativeFactory(), TorchFactory()):
        found = factory.speed_notes(config, threads)
        assert found[len(found) - len(of_ranks) :] == of_ranks
        assert set(of_threads).difference(of_ranks).isdisjoint(found)
