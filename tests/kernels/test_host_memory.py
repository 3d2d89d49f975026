import gc

from inference_svc.host.memory import resident_bytes
from kernels.host_memory import Slab, allocate_host

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


def test_pieces_of_a_slab_are_apart_and_zero() -> None:
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
