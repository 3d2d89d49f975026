"""Compiles the C++ sources, once per instruction set and state of the sources.

Runs at install, for every variant, and at first use, for the one that is missing. Standard library
only: the installer imports it.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
SOURCES = HERE / "src"
LIBRARIES = HERE / "lib"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
FLAGS: dict[str, tuple[str, ...]] = {
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""The variants, best first."""

_NEEDS: dict[str, frozenset[str]] = {
    "avx512_bf16": frozenset(
        {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}
    ),
    "avx512": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
}
_COMPILERS = ("g++", "clang++", "c++")


class CompileFailed(Exception):
    """The compiler refused the sources; the message holds what it said."""


def runnable_variants(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The variants that this machine can execute, best first."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return [variant for variant, needs in _NEEDS.items() if needs <= flags]


def installed_variants(machine: str | None = None) -> list[str]:
    """The variants that an installation on `machine` (this one) compiles: all, or none elsewhere
    than on x86."""
    is_x86 = (machine or platform.machine()).lower() in ("x86_64", "amd64")
    return list(FLAGS) if is_x86 else []


def find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def library_path(variant: str) -> Path:
    """Where the library of the sources as they are now belongs."""
    digest = hashlib.sha256(" ".join(FLAGS[variant]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return LIBRARIES / f"{variant}-{digest.hexdigest()[:16]}.so"


def ensure(variant: str) -> Path | None:
    """The library of `variant`, compiled now if need be; None without a compiler.

    Where the package's own folder cannot be written, a private one holds it until this process
    ends. Raises CompileFailed, or OSError where files cannot be written.
    """
    path = library_path(variant)
    if path.exists():
        return path
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        LIBRARIES.mkdir(exist_ok=True)
        lock = (LIBRARIES / f"{variant}.lock").open("w")
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="loadout-native-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = folder / path.name
        _compile(compiler, variant, path)
        return path
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling the same
        if not path.exists():
            _compile(compiler, variant, path)
            _forget_old(variant, path)
    return path


def _compile(compiler: str, variant: str, path: Path) -> None:
    # GOMP's symbols are left open: they are torch's own, so that one pool of threads serves both.
    units = [str(unit) for unit in sorted(SOURCES.glob("*.cpp"))]
    # gcc 12 finds its own intrinsics headers uninitialized.
    flags = ["-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall"]
    flags += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
    with tempfile.TemporaryDirectory(prefix="loadout-native-") as folder:
        compile_one = [compiler, *flags, *FLAGS[variant], "-c"]
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda unit: _run([*compile_one, unit], Path(folder)), units))
        objects = [str(unit) for unit in sorted(Path(folder).glob("*.o"))]
        finished = path.with_name(f".{path.name}.{Path(folder).name}")
        _run([compiler, "-shared", "-o", str(finished), *objects], Path(folder))
    finished.replace(path)
    log.info("compiled the native kernels for %s", variant)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileFailed(
            done.stderr.strip()[:2000] or f"{command[0]} ended with {done.returncode}"
        )


def _forget_old(variant: str, current: Path) -> None:
    for path in LIBRARIES.glob(f"{variant}-*.so"):
        if path != current:
            path.unlink(missing_ok=True)
