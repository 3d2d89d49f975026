"""The words of CUDA, torch, Triton and the driver: which fault each is, and what is said of it."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.cuda import DeferredCudaCallError

from inference_svc.engine.memory_budget import DRIVER_BYTES, IN_USE, Budget, Line
from inference_svc.errors import ENGINE_ADVICE, DeviceFault, DeviceFull, EngineFailed
from inference_svc.host import cuda_memory
from inference_svc.host.cuda_memory import UNKNOWN_PROGRAMS, CudaUnavailable, describe_programs
from inference_svc.host.device_faults import (
    MAX_CHARS,
    REMEDIES,
    SENTENCES,
    device_failure,
    engine_failed,
    find_fault,
    is_out_of_memory,
    start_failed,
)

GIB = 1 << 30
MORE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side "
    "assertions.\n"
)
"""What torch adds to most errors: it must not be read as the error."""
ERRORS = [
    (DeviceFault.HARDWARE, "CUDA error: uncorrectable ECC error encountered"),
    (DeviceFault.HARDWARE, "CUDA error: uncorrectable NVLink error detected during the execution"),
    (DeviceFault.HARDWARE, "CUDA error: hardware stack error"),
    (DeviceFault.HARDWARE, "Triton Error [CUDA]: uncorrectable ECC error encountered"),
    (DeviceFault.KERNEL, "CUDA error: an illegal memory access was encountered"),
    (DeviceFault.KERNEL, "Triton Error [CUDA]: an illegal memory access was encountered"),
    (DeviceFault.KERNEL, "CUDA error: unspecified launch failure"),
    (DeviceFault.KERNEL, "CUDA error: misaligned address"),
    (DeviceFault.KERNEL, "CUDA error: device-side assert triggered"),
    (DeviceFault.KERNEL, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    (DeviceFault.HUNG, "CUDA error: the launch timed out and was terminated"),
    (DeviceFault.LOST, "CUDA error: unknown error"),
    (DeviceFault.LOST, "CUDA error: no CUDA-capable device is detected"),
    (DeviceFault.LOST, "CUDA error: invalid device ordinal"),
    (DeviceFault.LOST, "No CUDA GPUs are available"),
    (DeviceFault.LOST, "CUDA unknown error - this may be due to an incorrectly set up environment"),
    (DeviceFault.LOST, "NVML error: GPU is lost"),
    (DeviceFault.DRIVER, "CUDA error: driver shutting down"),
    (DeviceFault.DRIVER, "CUDA error: system not yet initialized"),
    (
        DeviceFault.DRIVER,
        "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    ),
    (
        DeviceFault.DRIVER,
        "CUDA driver initialization failed, you might not have a CUDA gpu.",
    ),
    (DeviceFault.DRIVER, "Failed to initialize NVML: Driver/library version mismatch"),
    (
        DeviceFault.DRIVER,
        "CUDA error: system has unsupported display driver / cuda driver combination",
    ),
    (DeviceFault.DRIVER, "The NVIDIA driver on your system is too old (found version 11040)."),
    (DeviceFault.BUSY, "CUDA error: all CUDA-capable devices are busy or unavailable"),
    (DeviceFault.BUSY, "CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    (DeviceFault.MEMORY, "CUDA error: out of memory"),
    (DeviceFault.MEMORY, "Triton Error [CUDA]: out of memory"),
    (DeviceFault.MEMORY, "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total ..."),
    (DeviceFault.MEMORY, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
]
NO_FAULTS = [
    "index 2 is out of bounds for dimension 1 with size 2",
    "CUDA error: invalid argument",
    "CUDA error: invalid configuration argument",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "the shelf is out of memory",
    "",
]


@pytest.mark.parametrize(("kind", "text"), ERRORS, ids=[text[:60] for _, text in ERRORS])
def test_every_error_of_a_device_is_told(kind: DeviceFault, text: str) -> None:
    for error in (RuntimeError(text + MORE), torch.AcceleratorError(text + MORE)):
        found = find_fault(error)
        assert found is not None
        assert found.kind is kind
        assert found.words == text
        assert found.is_fatal is (kind is not DeviceFault.MEMORY)
        failure = engine_failed(error, "a step")
        assert failure.fault is kind
        assert f"a step failed: {SENTENCES[kind]} ({text})" in failure.message
        assert REMEDIES[kind] not in failure.message, "callers cannot do that"
        assert REMEDIES[kind] in failure.for_operator
        assert ENGINE_ADVICE not in failure.for_operator


@pytest.mark.parametrize("text", NO_FAULTS)
def test_other_errors_are_none_of_a_device(text: str) -> None:
    error = RuntimeError(text + MORE)
    assert find_fault(error) is None
    assert start_failed(error) is None
    failure = engine_failed(error, "a step")
    assert failure.fault is None
    assert failure.for_operator.endswith("its log has more")


def test_only_errors_of_the_runtime_are_read() -> None:
    assert find_fault(ValueError("CUDA error: unknown error")) is None
    assert find_fault(FileNotFoundError("/models/gpu: out of memory")) is None


def test_the_cause_of_an_error_counts() -> None:
    cause = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    try:
        raise KeyError("graph") from cause
    except KeyError as error:
        found = find_fault(error)
    assert found is not None
    assert found.kind is DeviceFault.HARDWARE


def test_an_error_while_another_is_handled_counts() -> None:
    with pytest.raises(KeyError) as caught:
        _fail_while_handling("CUDA error: uncorrectable ECC error encountered")
    found = find_fault(caught.value)
    assert found is not None
    assert found.kind is DeviceFault.HARDWARE
    caught.value.__suppress_context__ = True  # raised `from None`
    assert find_fault(caught.value) is None, "its writer says that it is none"


def _fail_while_handling(words: str) -> None:
    try:
        raise RuntimeError(words)
    except RuntimeError:
        assert {}["graph"]


def test_errors_that_lead_to_each_other_end() -> None:
    first, second = KeyError("first"), KeyError("second")
    first.__cause__, second.__context__ = second, first
    assert find_fault(first) is None


def test_what_torch_and_triton_raise_is_read_whatever_its_type() -> None:
    """A call that waits for the device's first use fails as a mere Exception."""
    words = "CUDA call failed lazily at initialization with error: CUDA error: unknown error"
    found = find_fault(DeferredCudaCallError(words))
    assert found is not None
    assert found.kind is DeviceFault.LOST
    triton = type("OfTriton", (Exception,), {"__module__": "triton.runtime.errors"})
    assert find_fault(triton("Triton Error [CUDA]: out of memory")) is not None
    other = type("OfOthers", (Exception,), {"__module__": "tritonclient"})
    assert find_fault(other("Triton Error [CUDA]: out of memory")) is None


def test_torch_says_by_its_type_that_memory_is_short() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert not is_out_of_memory(RuntimeError("CUDA error: unknown error"))


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("cuInit: CUDA error 100", DeviceFault.LOST),
        ("cuInit: CUDA error 999 (unknown error)", DeviceFault.LOST),
        ("cuInit: CUDA error 803", DeviceFault.DRIVER),
        ("cuInit: CUDA error 802 (system not yet initialized)", DeviceFault.DRIVER),
        ("cuMemGetInfo_v2: CUDA error 214", DeviceFault.HARDWARE),
        ("cuDevicePrimaryCtxRetain: CUDA error 46", DeviceFault.BUSY),
        ("cuDevicePrimaryCtxRetain: CUDA error 2 (out of memory)", DeviceFault.MEMORY),
        ("libcuda.so.1: cannot open shared object file", DeviceFault.DRIVER),
    ],
)
def test_numbers_of_the_driver_are_told_at_start(words: str, kind: DeviceFault) -> None:
    error = CudaUnavailable(f"cannot read the size of the device's memory: {words}")
    failure = start_failed(error)
    assert failure is not None
    assert device_failure(failure) is failure
    assert failure.fault is kind
    assert failure.message.startswith(f"the engine cannot start: {SENTENCES[kind]} (")
    assert words in failure.message
    assert failure.message.endswith(REMEDIES[kind])


def test_a_driver_that_does_not_answer_hangs() -> None:
    failure = start_failed(CudaUnavailable("the driver has not answered for 60 s"))
    assert failure is not None
    assert failure.fault is DeviceFault.HUNG


def test_a_driver_with_an_unknown_error_fails_as_before() -> None:
    assert start_failed(CudaUnavailable("cuDeviceGet: CUDA error 1")) is None
    assert device_failure(EngineFailed("its process was ended by SIGKILL")) is None


def test_what_is_said_is_bounded_and_complete() -> None:
    found = find_fault(RuntimeError("CUDA error: unknown error " + "x" * 10_000))
    assert found is not None
    assert len(found.sentence) < 2 * MAX_CHARS
    assert set(SENTENCES) == set(REMEDIES) == set(DeviceFault)
    for kind in (DeviceFault.HARDWARE, DeviceFault.LOST, DeviceFault.KERNEL, DeviceFault.HUNG):
        assert "nvidia-smi -r" in REMEDIES[kind]
        assert "dmesg" in REMEDIES[kind]


def test_a_failure_passes_from_process_to_process() -> None:
    failure = engine_failed(RuntimeError("CUDA error: unknown error"), "a step")
    copy = pickle.loads(pickle.dumps(failure))
    assert (copy.message, copy.fault, copy.remedy, copy.reason) == (
        *(failure.message, DeviceFault.LOST, REMEDIES[DeviceFault.LOST]),
        "ENGINE_FAILED",
    )
    assert copy.for_operator == failure.for_operator


# --- memory that others have --------------------------------------------------------------------


def budget(weights_bytes: int, in_use_bytes: int) -> Budget:
    lines = (Line("weights", weights_bytes), Line(IN_USE, in_use_bytes, "other programs"))
    return Budget("device", lines, 80 * GIB, "memory-limit")


def test_a_device_that_others_fill_is_full() -> None:
    with pytest.raises(DeviceFull) as caught:
        budget(60 * GIB, 50 * GIB).check()
    for words in (
        "too small by 30.0 GiB",
        "other programs use 50.0 GiB",
        "needs 60.0 GiB",
        "30.0 GiB are free",
    ):
        assert words in str(caught.value)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), DeviceFull)


@pytest.mark.parametrize("in_use_bytes", [0, GIB, DRIVER_BYTES])
def test_a_plan_that_is_too_large_is_nobody_elses_fault(in_use_bytes: int) -> None:
    with pytest.raises(ValueError, match="is too small") as caught:
        budget(81 * GIB, in_use_bytes).check()
    assert not isinstance(caught.value, DeviceFull)


@pytest.mark.processes
def test_who_fills_the_device_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '41, /opt/train, v2/main.py, 51200 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(cuda_memory, "PROGRAMS_COMMAND", (str(tool),))
    failure = device_failure(DeviceFull("30.0 GiB are missing"))
    assert failure is not None
    assert failure.fault is DeviceFault.MEMORY
    assert "30.0 GiB are missing" in failure.message
    assert "process 41: 51200 MiB, /opt/train, v2/main.py" in failure.message
    assert failure.message.endswith(REMEDIES[DeviceFault.MEMORY])


@pytest.mark.processes
@pytest.mark.parametrize(
    "script", ["exit 9", "echo", "echo 'No devices were found'", "exec sleep 600"]
)
def test_where_nobody_is_listed_it_is_said_who_can_tell(
    monkeypatch: pytest.MonkeyPatch, tmp_path, script: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(cuda_memory, "PROGRAMS_COMMAND", (str(tool),))
    monkeypatch.setattr(cuda_memory, "PROGRAMS_TIMEOUT_S", 0.5)
    assert describe_programs() == UNKNOWN_PROGRAMS


@pytest.mark.processes
def test_many_programs_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor i in $(seq 20); do echo "$i, p, 1 MiB"; done\n')
    tool.chmod(0o755)
    monkeypatch.setattr(cuda_memory, "PROGRAMS_COMMAND", (str(tool),))
    assert describe_programs().endswith("and 4 more")
