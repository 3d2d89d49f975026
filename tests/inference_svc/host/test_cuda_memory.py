"""A driver of our own in the place of CUDA's: what it is asked, and what its errors become."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from inference_svc.host import cuda_memory
from inference_svc.host.cuda_memory import CudaMemory, CudaUnavailable, ask_memory, has_driver

pytestmark = pytest.mark.processes

DRIVER = """
#include <stddef.h>
static int device = -1;
static void* context = 0;
#ifdef WORDS
int cuGetErrorString(int status, const char** out) { *out = WORDS; return 0; }
#endif
int cuInit(unsigned flags) { return INIT_STATUS; }
int cuDeviceGet(int* out, int ordinal) { *out = device = 7 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void** out, int of) { *out = &device; return of < 10 ? 0 : 101; }
int cuCtxSetCurrent(void* given) { context = given; return given == &device ? 0 : 201; }
int cuMemGetInfo_v2(size_t* free, size_t* total) {
  *free = (147ull - device) << 30;
  *total = 141ull << 30;
  return context ? 0 : 201;
}
"""


@pytest.fixture
def install_driver(tmp_path, monkeypatch):
    """`install_driver(init_status)`: what later processes find as CUDA's driver."""

    def install(init_status: int, words: str = "") -> None:
        source = tmp_path / "driver.c"
        source.write_text(DRIVER)
        library = tmp_path / cuda_memory.LIBRARY
        command = ["cc", "-shared", "-fPIC", f"-DINIT_STATUS={init_status}", "-o"]
        command[3:3] = [f'-DWORDS="{words}"'] if words else []
        subprocess.run([*command, str(library), str(source)], check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    return install


def test_memory_of_the_first_device(install_driver):
    install_driver(0)
    assert ask_memory() == CudaMemory(140 << 30, 141 << 30)


def test_the_least_memory_of_several_devices(install_driver):
    """Each rank takes as much of its own."""
    install_driver(0)
    assert ask_memory(3) == CudaMemory(138 << 30, 141 << 30)
    with pytest.raises(CudaUnavailable, match="CUDA error 101"):
        ask_memory(4)


def test_an_error_of_the_driver_is_named(install_driver):
    install_driver(100)
    with pytest.raises(CudaUnavailable, match=r"device's memory: cuInit: CUDA error 100$"):
        ask_memory()


def test_its_own_words_follow(install_driver):
    install_driver(214, "uncorrectable ECC error encountered")
    with pytest.raises(CudaUnavailable) as caught:
        ask_memory()
    assert str(caught.value).endswith(
        "cuInit: CUDA error 214 (uncorrectable ECC error encountered)"
    )


def test_a_driver_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    program = tmp_path / "hangs.py"
    program.write_text("import time; time.sleep(3600)")
    monkeypatch.setattr(cuda_memory, "__file__", str(program))
    monkeypatch.setattr(cuda_memory, "TIMEOUT_S", 0.5)
    with pytest.raises(CudaUnavailable, match="has not answered"):
        ask_memory()


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a driver here")
def test_no_driver():
    assert not has_driver()
    with pytest.raises(CudaUnavailable, match=r"libcuda\.so\.1"):
        ask_memory()
