"""Compiles the C++ sources, once per instruction set and state of the sources.

A wheel has every variant. A checkout compiles this machine's best one at its installation, and a
missing one at first use; `python -m kernels.native.build` compiles all that this machine can run.
Only the standard library, because the installer imports this module.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARIES = HERE / "lib"

# gcc 12 finds its own intrinsics headers uninitialized.
_COMMON_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    *("-Wall", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
FLAGS: dict[str, tuple[str, ...]] = {
    "amx_bf16": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""The variants, best first."""
TILE_VARIANTS = frozenset({"amx_bf16"})
"""Variants that use the tile registers of AMX, for which a process needs a permission."""

_AVX2_NEEDS = frozenset({"avx2", "fma", "f16c"})
_AVX512_NEEDS = _AVX2_NEEDS | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# All processors with the bf16 instructions have VNNI.
_AVX512_BF16_NEEDS = _AVX512_NEEDS | {"avx512_bf16", "avx512_vnni"}
_NEEDS: dict[str, frozenset[str]] = {
    "amx_bf16": _AVX512_BF16_NEEDS | {"amx_tile", "amx_bf16", "amx_int8"},
    "avx512_bf16": _AVX512_BF16_NEEDS,
    "avx512": _AVX512_NEEDS,
    "avx2": _AVX2_NEEDS,
}
_COMPILERS = ("g++", "clang++", "c++")
COMPILE_TIMEOUT_S = 600.0
"""Timeout of one source, and so of processes that wait for the lock of a compiler that hangs."""


class CompileFailed(Exception):
    """The compiler refused the sources, and the message holds what it said; or it hung."""


CPU_INFO = Path("/proc/cpuinfo")


def processor_flags(cpuinfo: Path = CPU_INFO) -> frozenset[str]:
    """The names of the first processor's features; none where the system does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset()
    )


def runnable_variants(cpuinfo: Path = CPU_INFO) -> list[str]:
    """The variants that this machine can execute, best first."""
    flags = processor_flags(cpuinfo)
    return [variant for variant, needs in _NEEDS.items() if needs <= flags]


def installed_variants(machine: str | None = None) -> list[str]:
    """Returns the variants that a wheel for `machine` (default: this one) has: all on x86, else
    none."""
    is_x86 = (machine or platform.machine()).lower() in ("x86_64", "amd64")
    return list(FLAGS) if is_x86 else []


def find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def library_path(variant: str) -> Path:
    """Where the library of the sources and flags as they are now belongs."""
    digest = hashlib.sha256(" ".join((*_COMMON_FLAGS, *FLAGS[variant])).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return LIBRARIES / f"{variant}-{digest.hexdigest()[:16]}.so"


def ensure(variant: str) -> Path | None:
    """The library of `variant`, compiled now if need be; None without a compiler.

    Where the package's own folder cannot be written or locked, a private one holds it until this
    process ends. Raises CompileFailed, or OSError where no file can be written at all.
    """
    path = library_path(variant)
    if path.exists():
        return path
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        LIBRARIES.mkdir(exist_ok=True)
        with (LIBRARIES / f"{variant}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling the same
            if not path.exists():
                _compile(compiler, variant, path)
                _forget_old(variant, path)
        return path
    except OSError as error:
        logger.info("the native kernels go to a private folder: %s", error)
    folder = Path(tempfile.mkdtemp(prefix="loadout-native-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / path.name
    _compile(compiler, variant, path)
    return path


def _compile(compiler: str, variant: str, path: Path) -> None:
    # GOMP's symbols are left open: they are torch's own, so that one pool of threads serves both.
    units = [str(unit) for unit in sorted(SOURCES.glob("*.cpp"))]
    with tempfile.TemporaryDirectory(prefix="loadout-native-") as name:
        folder = Path(name)
        compile_one = [compiler, *_COMMON_FLAGS, *FLAGS[variant], "-c"]
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda unit: _run([*compile_one, unit], folder), units))
        linked = folder / path.name
        objects = [str(unit) for unit in sorted(folder.glob("*.o"))]
        _run([compiler, "-shared", "-o", str(linked), *objects], folder)
        # By us, not by the linker: a full disk is then an OSError, and not a refusal.
        finished = path.with_name(f".{path.name}.{folder.name}")
        try:
            shutil.copy(linked, finished)
            finished.replace(path)
        except OSError:
            finished.unlink(missing_ok=True)
            raise
    logger.info("compiled the native kernels for %s", variant)


def _run(command: list[str], folder: Path) -> None:
    """In a session of its own: a compiler's children hold its pipe open and must end with it."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, said = process.communicate(timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise CompileFailed(f"{command[0]} has not ended in {COMPILE_TIMEOUT_S:.0f} s") from None
    if process.returncode:
        raise CompileFailed(said.strip()[:2000] or f"{command[0]} ended with {process.returncode}")


def _forget_old(variant: str, current: Path) -> None:
    for path in LIBRARIES.glob(f"{variant}-*.so"):
        if path != current:
            with contextlib.suppress(OSError):
                path.unlink()


if __name__ == "__main__":
    for each in runnable_variants():
        ensure(each)
