from pathlib import Path

import pytest

from inference_svc.config import InferenceSettings, Machine
from inference_svc.host import device_info
from inference_svc.host.cuda_memory import CudaMemory
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
