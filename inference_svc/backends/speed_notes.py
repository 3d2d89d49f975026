"""Sentences for operators: why this machine computes more slowly than it could, or than others do,
and which setting helps.

All are functions of facts, so that they can be tested without the machine. A claim about speed is
one of bench/README.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from inference_svc.host.cpus import Processor, counted
from kernels.native.build import TILE_VARIANTS
from kernels.native.tile_permission import REFUSED

BF16_FLAG = "avx512_bf16"
"""How /proc/cpuinfo names vector instructions for bfloat16."""
BF16_VARIANTS = (BF16_FLAG, "amx_bf16")
"""The native kernels with instructions for bfloat16: of vectors, and AMX's of tiles."""
OLDEST_CAPABILITY = (8, 0)
"""The oldest CUDA devices that tests compile the kernels for."""


class FormatKernels(NamedTuple):
    """A format of weights in few bits, such as "int4, groups of 128", and the code that multiplies
    by it: see `BackendFactory.weight_kernels`."""

    format: str
    kernels: str


class Speed(NamedTuple):
    """How fast an engine can compute: `num_threads` on the CPU, 0 where a device computes, notes
    for operators, the host's processor, and the code for each format of its weights in few bits."""

    num_threads: int
    notes: tuple[str, ...]
    processor: Processor
    weight_formats: tuple[FormatKernels, ...] = ()


def thread_notes(num_threads: int, num_cores: int, num_cpus: int, num_ranks: int = 1) -> list[str]:
    """Returns notes if other than all usable cores compute. Siblings of one core are one of
    `num_cores`, and each one of `num_cpus`; each of `num_ranks` processes has `num_threads`."""
    most = max(1, num_cores // num_ranks)
    if num_threads == most:
        return []
    cores, processors = counted(num_cores, "core"), counted(num_cpus, "processor")
    computing = f"{computing_threads(num_threads, num_ranks)}, and this process may use"
    if num_threads < most:
        return [f"{computing} {cores}: with --num-threads {most} it computes faster"]
    if num_threads * num_ranks > num_cpus:
        return [
            f"{computing} {processors}: threads that share one wait for each other, and "
            f"--num-threads {most} is faster"
        ]
    return [
        f"{computing} {cores} with {processors}: two threads of a core share its units, so they "
        "compute products no faster, and each operation waits for the slower one. They can hide "
        f"the latency of memory: measure if --num-threads {most}, the default, is faster"
    ]


def computing_threads(num_threads: int, num_ranks: int = 1) -> str:
    """Returns the beginning of a sentence, such as "2 ranks of 4 threads compute"."""
    threads = counted(num_threads, "thread")
    if num_ranks > 1:
        return f"{num_ranks} ranks of {threads} compute"
    return f"{threads} {'computes' if num_threads == 1 else 'compute'}"


def native_notes(
    dtype: str, variant: str, flags: Collection[str], faults: Sequence[str]
) -> list[str]:
    """Returns notes on the native kernels.

    Args:
        dtype: "bfloat16" or "float32".
        variant: Instruction set of the library that serves.
        flags: Features of the processor, by their names in /proc/cpuinfo.
        faults: Why libraries for better instruction sets do not serve.
    """
    notes = []
    if dtype == "float32":  # to which tiles give nothing
        faults = [fault for fault in faults if fault.partition(":")[0] not in TILE_VARIANTS]
    if faults:
        notes.append(
            f"the native kernels for {variant} compute, though this processor executes better ones "
            f"({'; '.join(faults)}): {_remedy(faults)}"
        )
    if dtype == "float32":
        if variant in BF16_VARIANTS:
            notes.append(
                "float32 has twice the bytes of bfloat16, for which this processor has "
                "instructions: --dtype bfloat16 is faster, and less precise"
            )
    elif BF16_FLAG not in flags:
        notes.append(
            "this processor has no instructions for bfloat16 (AVX-512 BF16): products are computed "
            "in float32, and prompts take longer than on a processor that has them"
        )
    return notes


def _remedy(faults: Sequence[str]) -> str:
    if all(REFUSED in fault for fault in faults):
        return "run on Linux 5.16 or newer, in a sandbox that allows arch_prctl"
    return "install a newer g++, and the next start compiles them"


def torch_notes(dtype: str, *, is_chosen: bool, faults: Sequence[str]) -> list[str]:
    """Returns the reason for which torch computes on a CPU: somebody has chosen it, or the dtype,
    or the native kernels' `faults`."""
    if is_chosen:
        why = "native-kernels is false: set it to true"
    elif dtype == "float16":
        why = "they do not compute float16: set --dtype bfloat16 or float32"
    else:
        why = "; ".join(faults)
        if any(fault.endswith("no compiler") for fault in faults):
            why += ": install g++, and the next start compiles them"
    return [f"torch computes, which is slower than the native kernels: {why}"]


def device_notes(
    name: str, capability: tuple[int, int], measured_devices: Collection[str]
) -> list[str]:
    """Returns notes on a CUDA device with this compute capability. `measured_devices` have
    constants of their own for the kernels."""
    notes = []
    if capability < OLDEST_CAPABILITY:
        notes.append(
            f"{name} has compute capability {_version(capability)}, and the kernels are made for "
            f"{_version(OLDEST_CAPABILITY)} and later: they may be slow or fail"
        )
    if name not in measured_devices:
        notes.append(
            f"the kernels use default constants, because none were measured on {name}, only on "
            f"{', '.join(measured_devices)}: the stage `tune` of tools/gpu_run.sh measures them "
            "(docs/development/gpu-run.md)"
        )
    return notes


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
