import gc

from inference_svc.memory import resident_bytes
from kernels.host_memory import allocate_host

MIB = 1 << 20


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
