"""The C modules through which Triton launches our kernels, compiled ahead for machines that have no
C compiler.

Triton compiles kernels with its own tools, but it needs the system's compiler for the modules that
hand them to the GPU's driver: one module, and before Triton 3.7 one more for each list of argument
types. Without a compiler, Triton takes these modules from its cache. `python -m
kernels.triton_launchers` fills the cache that TRITON_CACHE_DIR names. That needs neither a GPU nor
its driver.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from triton.backends.nvidia import driver
from triton.runtime import JITFunction
from triton.runtime.build import compile_module_from_src, platform_key
from triton.runtime.cache import get_cache_manager

from kernels.attention import triton_kernels as attention
from kernels.elementwise import triton_kernels as elementwise
from kernels.experts import triton_kernels as experts
from kernels.lora import triton_kernels as lora
from kernels.quantised import triton_kernels as quantised
from kernels.recurrence import triton_kernels as recurrence
from kernels.replaced import triton_kernels as replaced

POINTER, INTEGER, NUMBER, ABSENT = "*fp32", "i32", "fp32", "constexpr"
"""Triton's names of types. All pointers are launched alike; arguments that are None or 1 are not
passed."""

MODULES = (attention, elementwise, experts, lora, quantised, recurrence, replaced)

INTEGERS = {*attention.VARYING, *experts.VARYING, *lora.VARYING, *recurrence.VARYING}
INTEGERS |= {*replaced.VARYING, *quantised.VARYING, "vocab_size", "expert_rows"}
NUMBERS = {"eps", "scale", "delta_scale", "sum_scale", "scaling", "offset", "alpha", "limit"}
ADDEND = {"addend", "slots"}
SCALES = {"scales"}
OF_FORMATS = [
    offsets | bias | factors
    for offsets in (set(), {"offsets"})
    for bias in (set(), {"bias"})
    for factors in (set(), {"x_scales"})
]
MAYBE_NONE: dict[str, list[set[str]]] = {
    "add_rms_norm_kernel": [
        *({"bias"}, {"bias", "rows"}, {"bias", "delta", "rows"}),
        *({"bias", *ADDEND}, {"bias", "rows", *ADDEND}, {"bias", "delta", "rows", *ADDEND}),
        *(set[str](), {"rows"}, {"delta", "rows"}),
        *(ADDEND, {"delta", *ADDEND}, {"rows", *ADDEND}, {"delta", "rows", *ADDEND}),
    ],
    "combine_experts_kernel": [set(), {"shared_logits"}, {"shared", "shared_logits"}],
    "combine_kernel": [set(), {"sinks"}],
    "decode_kernel": [set(), SCALES],
    "count_pairs_kernel": [set(), {"order"}],
    "expand_kernel": [{"token_ids"}, {"token_ids", "base_bias"}, {"y", "base_bias"}],
    "experts_linear_kernel": [set(), {"bias"}, {"rows"}, {"bias", "rows"}],
    "few_rows_kernel": OF_FORMATS,
    "many_rows_kernel": [
        absent | starts for absent in OF_FORMATS for starts in (set(), {"starts"})
    ],
    "place_pairs_kernel": [set(), {"order"}],
    "prefill_kernel": [
        absent | scales
        for absent in ({"ends"}, {"ends", "sinks"}, {"sinks"})
        for scales in (set(), SCALES)
    ],
    "rank_pairs_kernel": [set(), {"order"}, {"starts", "rows", "order"}],
    "replace_logits_kernel": [set(), {"bias"}],
    "route_kernel": [set(), {"bias"}, {"expert_scales"}, {"bias", "expert_scales"}],
    "store_kernel": [
        absent | addend | scales
        for addend in (set(), ADDEND)
        for scales in (set(), SCALES)
        for absent in (
            {"q_scale"},
            {"v_norm", "q_scale"},
            {"k_norm", "v_norm", "q_scale"},
            {"q_norm", "k_norm", "v_norm", "q_scale"},
            {"cos", "sin", "q_norm", "k_norm", "v_norm", "q_scale"},
            {"q_norm", "k_norm", "v_norm"},
        )
    ],
    "sum_splits_kernel": [set(), {"bias"}, {"x_scales"}, {"bias", "x_scales"}],
    "swiglu_kernel": [set(), ADDEND],
}
"""Arguments that are None together in launches of a kernel. Other kernels have none."""
MAYBE_ONE = {"table_stride"}
"""Strides that are 1 for some settings: a page table has one column if a page holds a sequence."""
LINKAGES = ("", "ELF")
"""Triton's key of a module has the output of `file` on Python, or "" if there is no `file`."""

STUB = "void loadout_stub(void) {}\n"


def kernels() -> list[Any]:
    """Returns all kernels that are launched."""
    found = [each for module in MODULES for each in vars(module).values()]
    return [k for k in found if isinstance(k, JITFunction) and k.__name__.endswith("_kernel")]


def signatures(kernel: Any) -> Iterator[dict[str, str]]:
    """The types of the arguments in every launch that our operations can make."""
    names = [parameter.name for parameter in kernel.params]
    for absent in MAYBE_NONE.get(kernel.__name__, [set()]):
        types = [_types(parameter, absent) for parameter in kernel.params]
        for chosen in itertools.product(*types):
            yield dict(zip(names, chosen, strict=True))


def _types(parameter: Any, absent: set[str]) -> tuple[str, ...]:
    name = parameter.name
    if parameter.is_constexpr or name in absent:
        return (ABSENT,)
    if name in NUMBERS:
        return (NUMBER,)
    if name in INTEGERS or name.endswith("_stride"):
        return (INTEGER, ABSENT) if name in MAYBE_ONE else (INTEGER,)
    return (POINTER,)


def modules() -> dict[str, str]:
    """C source and name of every module."""
    found = {Path(driver.dirname, "driver.c").read_text(): "cuda_utils"}
    for kernel in kernels():
        for signature in signatures(kernel):
            found |= launcher(signature)
    return found


def launcher(signature: dict[str, str]) -> dict[str, str]:
    """The module of a launch with arguments of these types; none where Triton needs none."""
    make = getattr(driver, "make_launcher", None)
    return {} if make is None else {make({}, signature, None): "__triton_launcher"}


def is_cached(source: str, name: str) -> bool:
    """Whether Triton finds the module compiled."""
    return _cached_file(_key(source, platform_key()), name) is not None


def compile_modules() -> int:
    """Fills Triton's cache; how many modules it then has. Raises RuntimeError without a compiler,
    and CalledProcessError where it fails."""
    wanted = modules()
    with tempfile.TemporaryDirectory(prefix="loadout-triton-") as folder:
        _make_stub(Path(folder))
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda source: _compile(source, wanted[source], folder), wanted))
    return len(wanted)


def _compile(source: str, name: str, folder: str) -> None:
    # It loads the module that it has compiled and cached, which needs a real driver.
    with contextlib.suppress(ImportError):
        compile_module_from_src(
            src=source,
            name=name,
            library_dirs=[driver.libdevice_dir, folder],
            include_dirs=driver.include_dirs,
            libraries=driver.libraries,
        )
    path = _cached_file(_key(source, platform_key()), name)
    if path is None:
        raise RuntimeError(f"Triton has not kept {name}")
    machine, system, bits, _ = platform_key().split(",")
    for linkage in LINKAGES:
        key = _key(source, ",".join((machine, system, bits, linkage)))
        get_cache_manager(key).put(Path(path).read_bytes(), _file_name(name), binary=True)


def _key(source: str, platform: str) -> str:
    return hashlib.sha256((source + platform).encode()).hexdigest()


def _cached_file(key: str, name: str) -> str | None:
    found: str | None = get_cache_manager(key).get_file(_file_name(name))
    return found


def _file_name(name: str) -> str:
    return f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _make_stub(folder: Path) -> None:
    """A stand-in for the GPU's driver while modules are linked; only its name matters."""
    [library] = driver.libraries
    source = folder / "stub.c"
    source.write_text(STUB)
    command = ["cc", "-shared", f"-Wl,-soname,{library}", "-o", str(folder / library), str(source)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    print(f"{compile_modules()} modules compiled")
