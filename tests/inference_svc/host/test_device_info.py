from dataclasses import replace
from pathlib import Path

import pytest

from inference_svc.auto_settings import Machine, ModelFacts, resolve
from inference_svc.config import InferenceSettings
from inference_svc.errors import DeviceFault, EngineFailed
from inference_svc.host import device_info
from inference_svc.host.cuda_memory import CudaMemory, CudaUnavailable
from inference_svc.host.device_info import find_machine
from servicekit.errors import InvalidSetting


def test_device_is_queried_only_if_it_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def ask_memory(num_devices: int) -> CudaMemory:
        asked.append(num_devices)
        return CudaMemory(1000, 2000)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr(device_info, "ask_memory", ask_memory)
    monkeypatch.setattr(device_info, "available_bytes", lambda: 5000)
    monkeypatch.setattr(device_info, "resident_bytes", lambda: 400)
    (tmp_path / "config.json").write_text("{}")
    on_cpu = find_machine(InferenceSettings(model=tmp_path, device="cpu"))
    assert on_cpu == Machine(has_cuda=False, host_free_bytes=5000)
    assert not asked
    with_devices = Machine(True, 1000, 2000, 5000, num_devices=3)
    assert find_machine(InferenceSettings(model=tmp_path)) == with_devices
    limited = InferenceSettings(model=tmp_path, host_memory_limit=9000, tensor_parallel=8)
    expected = replace(with_devices, host_free_bytes=8600)
    assert find_machine(limited) == expected, "whatever the machine says"
    assert asked == [1, 3]


@pytest.fixture
def lost_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver whose device has vanished; returns a model's folder."""

    def ask_memory() -> CudaMemory:
        raise CudaUnavailable("cuInit: CUDA error 100 (no CUDA-capable device is detected)")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(device_info, "has_driver", lambda: True)
    monkeypatch.setattr(device_info, "ask_memory", ask_memory)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_device_that_was_asked_for_and_has_vanished_is_a_fault(lost_device: Path) -> None:
    with pytest.raises(EngineFailed, match="the device has vanished") as caught:
        find_machine(InferenceSettings(model=lost_device, device="cuda"))
    assert caught.value.fault is DeviceFault.LOST
    assert "no CUDA-capable device" in caught.value.message


def test_the_cpu_does_not_stand_in_unsaid(
    lost_device: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged at once: the CPU's memory may not suffice for the model."""
    machine = find_machine(InferenceSettings(model=lost_device))
    assert not machine.has_cuda
    [note] = machine.speed_notes
    assert caplog.messages == [note]
    assert note.startswith("the CPU computes, not a GPU: there is a driver")
    assert "error 100" in note


@pytest.mark.parametrize(
    ("built_for", "expected"),
    [(None, "is built without CUDA: install its build for CUDA"), ("13.0", "its CUDA 13.0 may")],
)
def test_a_torch_that_cannot_use_the_device_is_named(
    lost_device: Path, monkeypatch: pytest.MonkeyPatch, built_for: str | None, expected: str
) -> None:
    """Also to those who ask for the device, and get none."""
    monkeypatch.setattr(device_info, "ask_memory", lambda *count: CudaMemory(1000, 2000))
    monkeypatch.setattr("torch.version.cuda", built_for)
    machine = find_machine(InferenceSettings(model=lost_device))
    [note] = machine.speed_notes
    assert expected in note
    settings = InferenceSettings(model=lost_device, device="cuda")
    machine = find_machine(settings)
    with pytest.raises(InvalidSetting, match=r"^--device cuda: torch .*CUDA"):
        resolve(settings, machine, ModelFacts("float32", 64, 1, 1))


def test_a_machine_without_a_driver_computes_on_its_cpu(
    lost_device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_info, "has_driver", lambda: False)
    for device in ("auto", "cuda"):
        machine = find_machine(InferenceSettings(model=lost_device, device=device))
        assert not machine.has_cuda
        assert not machine.speed_notes


def test_an_error_of_the_driver_without_a_name_stays(
    lost_device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_memory() -> CudaMemory:
        raise CudaUnavailable("cuInit: CUDA error 1")

    monkeypatch.setattr(device_info, "ask_memory", ask_memory)
    with pytest.raises(CudaUnavailable, match=r"error 1$"):
        find_machine(InferenceSettings(model=lost_device, device="cuda"))
