import logging
from pathlib import Path

import pytest

from inference_svc.config import InferenceSettings, Machine
from inference_svc.errors import DeviceFault, EngineFailed
from inference_svc.host import device_info
from inference_svc.host.cuda_memory import CudaMemory, CudaUnavailable
from inference_svc.host.device_info import find_machine


def test_device_is_queried_only_if_it_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def ask_memory() -> CudaMemory:
        asked.append(True)
        return CudaMemory(1000, 2000)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(device_info, "ask_memory", ask_memory)
    monkeypatch.setattr(device_info, "available_bytes", lambda: 5000)
    monkeypatch.setattr(device_info, "resident_bytes", lambda: 400)
    (tmp_path / "config.json").write_text("{}")
    on_cpu = find_machine(InferenceSettings(model=tmp_path, device="cpu"))
    assert on_cpu == Machine(has_cuda=False, host_free_bytes=5000)
    assert not asked
    assert find_machine(InferenceSettings(model=tmp_path)) == Machine(True, 1000, 2000, 5000)
    limited = InferenceSettings(model=tmp_path, host_memory_limit=9000)
    assert find_machine(limited) == Machine(True, 1000, 2000, 8600), "whatever the machine says"


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
    with caplog.at_level(logging.WARNING):
        assert not find_machine(InferenceSettings(model=lost_device)).has_cuda
    assert "the CPU computes" in caplog.text
    assert "error 100" in caplog.text


def test_a_machine_without_a_driver_computes_on_its_cpu(
    lost_device: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_info, "has_driver", lambda: False)
    for device in ("auto", "cuda"):
        assert not find_machine(InferenceSettings(model=lost_device, device=device)).has_cuda
    assert not caplog.records


def test_an_error_of_the_driver_without_a_name_stays(
    lost_device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_memory() -> CudaMemory:
        raise CudaUnavailable("cuInit: CUDA error 1")

    monkeypatch.setattr(device_info, "ask_memory", ask_memory)
    with pytest.raises(CudaUnavailable, match=r"error 1$"):
        find_machine(InferenceSettings(model=lost_device, device="cuda"))
