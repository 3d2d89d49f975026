import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.host.memory import resident_bytes
from kernels import host_memory
from kernels.host_memory import (
    HostRegistrar,
    Slab,
    allocate_host,
    allocate_pinned,
    row_stride,
    view_of,
)

MIB = 1 << 20


class CudaRuntime:
    """Keeps what is registered, by address."""

    def __init__(self, status: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.flags: list[int] = []
        self._status = status

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.flags.append(flags)
        if not self._status:
            self.registered[address] = num_bytes
        return self._status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return self._status if self.registered.pop(address, None) else 1


@pytest.mark.slow
def test_large_memory_is_resident_from_the_start_and_freed_with_its_last_view() -> None:
    before = resident_bytes()
    memory = allocate_host(256 * MIB)
    assert memory.data_ptr() % 4096 == 0
    assert not memory[:: 1 << 16].any()
    assert resident_bytes() - before >= 255 * MIB
    view = memory.view(-1, 256)[7]
    del memory
    view.fill_(3)
    assert resident_bytes() - before >= 255 * MIB
    del view
    gc.collect()
    assert resident_bytes() - before < 128 * MIB


def test_small_memory_is_zeroed() -> None:
    assert allocate_host(1000).sum() == 0


def test_pieces_of_a_slab_are_apart_and_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slab, "CHUNK_BYTES", 4 * MIB)
    slab = Slab()
    sizes = [1, 64, 100, 3 << 20, Slab.CHUNK_BYTES + 5, 7]
    pieces = [slab.take(size) for size in sizes]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % Slab.ALIGNMENT_BYTES == 0
        assert not piece.any()
        piece.fill_(number + 1)
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert len(piece) == size
        assert (piece == number + 1).all()


def test_pinned_memory_is_exact_and_unpinned_with_its_last_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = CudaRuntime()
    monkeypatch.setattr(host_memory, "_cuda_runtime", lambda: runtime)
    memory = allocate_pinned(5 * MIB)
    assert not memory.any()
    assert runtime.registered == {memory.data_ptr(): 5 * MIB}
    view = memory[MIB:]
    del memory
    gc.collect()
    assert runtime.registered
    del view
    gc.collect()
    assert not runtime.registered


def test_memory_that_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_cuda_runtime", lambda: CudaRuntime(status=2))
    with pytest.raises(OSError, match="4096 bytes of host memory cannot be pinned"):
        allocate_pinned(4096)


def test_memory_of_others_is_registered_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping without write access, as it is."""
    runtime, entered = CudaRuntime(), []

    @contextmanager
    def on_device() -> Iterator[None]:
        entered.append(len(runtime.registered))
        yield

    monkeypatch.setattr(host_memory, "_cuda_runtime", lambda: runtime)
    registrar = HostRegistrar(on_device)
    with mmap.mmap(-1, 3 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ) as mapping:
        with memoryview(mapping) as data:
            registrar.register(data)
            assert runtime.registered == {view_of(data).data_ptr(): 3 * MIB}
            assert runtime.flags == [1 | 8], "for all contexts, and read-only"
            registrar.unregister(data)
            assert entered == [0, 1]
            with pytest.raises(OSError, match="CUDA error 1"):
                registrar.unregister(data)
        assert not runtime.registered


def test_memory_of_others_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_cuda_runtime", lambda: CudaRuntime(status=801))
    refusal = "4096 bytes of shared memory cannot be registered: CUDA error 801"
    with pytest.raises(OSError, match=refusal):
        HostRegistrar(nullcontext).register(memoryview(bytes(4096)))


def test_a_view_is_of_the_memory_itself() -> None:
    data = bytearray(b"abc")
    view = view_of(memoryview(data))
    data[1] = 0
    assert view.tolist() == [97, 0, 99]


@given(st.integers(1, 1 << 15), st.sampled_from([1, 2, 4]))
def test_long_rows_are_an_odd_number_of_lines_apart(width: int, item_bytes: int) -> None:
    """No more than they need, and short ones are not apart."""
    stride = row_stride(width, item_bytes)
    if width * item_bytes < 1024:
        assert stride == width
        return
    lines, rest = divmod(stride * item_bytes, 64)
    assert rest == 0
    assert lines % 2 == 1
    assert width <= stride < width + 128 // item_bytes
