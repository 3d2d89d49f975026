"""What engines tell of resident adapters: true to the bytes in memory and to what steps run."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inference_svc.adapters.layout import EMBEDDING, HEAD
from inference_svc.adapters.pulls.registration import Registrations
from inference_svc.adapters.targets import lora_groups
from inference_svc.api.grpc.convert import to_inspected
from inference_svc.backends.select import BACKENDS
from inference_svc.engine import build
from inference_svc.engine.control.status_types import AdapterDetails
from inference_svc.engine.transport.messages import Call, Command
from inference_svc.errors import AdapterNotFound
from kernels.native.library import Program
from loadout.inference.v1 import inference_pb2 as pb
from tests.support.inference.memory_store import MemoryRegistrar
from tests.support.models.zoo import SPECS
from tests.support.wait import until
from tests.system.engines import Running
from tests.system.kinds import ADDED, make_kinds

PROMPT = [5, 60, 9, 33, 71, 12]
NAMES = [spec.name for spec in SPECS]


def inspect(running: Running, name: str) -> AdapterDetails:
    """Inspects an adapter as through a process of the engine's own."""
    reply = running.call(Command.INSPECT_ADAPTER, name)
    assert reply.error is None, reply.error
    details: AdapterDetails = pickle.loads(pickle.dumps(reply.result))
    return details


def load(running: Running, name: str) -> None:
    assert running.call(Command.LOAD, name).error is None


def check_bytes(running: Running, name: str, details: AdapterDetails, memory: Any) -> None:
    """Asserts that each segment lies in `memory` where the details say, and nothing is left out."""
    image = running.store.image(running.digests[name])
    data = image.buffer.numpy().tobytes()
    segments = image.plan.segments
    ours, stored = running.engine.layout.targets, running.store.layout.targets
    names = [ours[column].name for column in details.targets.tolist()]
    assert names == [stored[segment.target].name for segment in segments]
    assert list(details.kinds) == [segment.kind for segment in segments]
    assert details.ranks.tolist() == [segment.rank for segment in segments]
    assert details.lengths.tolist() == [segment.length_bytes for segment in segments]
    for segment, offset in zip(segments, details.offsets.tolist(), strict=True):
        found = bytes(memory[offset : offset + segment.length_bytes])
        assert found == data[segment.offset : segment.offset + segment.length_bytes]
        assert any(
            start <= offset and offset + segment.length_bytes <= start + size
            for start, size in details.extents
        )
    assert sum(size for _, size in details.extents) == details.adapter.num_bytes


@pytest.mark.parametrize("host_bytes", [0, 2 << 20], ids=["arena-only", "host-tier"])
def test_segments_lie_where_it_says(start: Callable[..., Running], host_bytes: int) -> None:
    running = start(host_bytes=host_bytes)
    for name in NAMES:
        load(running, name)
    built = running.engine.built
    slots = []
    for spec in SPECS:
        details = inspect(running, spec.name)
        assert (details.adapter.tier, details.adapter.rank) == ("device", spec.rank)
        check_bytes(running, spec.name, details, built.engine.runner.backend.arena.memory)
        slots.append(details.slot)
    assert sorted(slots) == list(range(len(SPECS)))


def test_an_image_in_pieces(start: Callable[..., Running]) -> None:
    """The free memory is two holes, neither of which holds it."""
    whole = start()
    sizes = {
        name: whole.store.image(whole.digests[name]).plan.total_bytes
        for name in ("r1", "r16", "r33")
    }
    rest = (sizes["r16"] - sizes["r33"] // 2) // 256 * 256
    running = start(arena_bytes=sizes["r33"] + sizes["r1"] + rest, max_lora_rank=33)
    load(running, "r33")
    load(running, "r1")
    assert running.call(Command.UNLOAD, "r33").error is None
    load(running, "r16")
    details = inspect(running, "r16")
    assert len(details.extents) == 2
    assert inspect(running, "r1").adapter.tier == "device"
    check_bytes(running, "r16", details, running.engine.built.engine.runner.backend.arena.memory)


def test_images_are_in_both_tiers_once_they_are_registered(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come to the device from where they are mapped. Here it is a CPU."""
    registrar = MemoryRegistrar()
    for factory in BACKENDS:
        monkeypatch.setattr(type(factory), "host_registrar", lambda self, config: registrar)
    monkeypatch.setattr(build, "Registrations", partial(Registrations, min_bytes=0))
    running = start(host_bytes=2 << 20, max_loras=len(NAMES))
    running.store.maps = True
    for name in NAMES:
        load(running, name)
    built = running.engine.built
    registrations = built.puller.registrations
    assert registrations is not None
    until(lambda: not registrations.num_images and not built.residency.tiers.filling)
    assert registrations.results()["registered"] == registrar.num_registered == len(NAMES)
    assert not registrar.registered
    backend = built.engine.runner.backend
    for name in NAMES:
        details = inspect(running, name)
        assert details.adapter.tier == "device"
        check_bytes(running, name, details, backend.arena.memory)
        data = running.store.image(running.digests[name]).buffer.numpy().tobytes()
        hosted = built.residency.tiers.host_resident(running.digests[name])
        assert hosted is not None
        for extent in hosted.extents:
            part = data[extent.image_offset :][: extent.num_bytes]
            assert bytes(backend.pull_memory[extent.start : extent.start + len(part)]) == part


def test_what_left_the_device_is_in_the_host_tier(start: Callable[..., Running]) -> None:
    running = start(host_bytes=2 << 20, max_loras=1)
    load(running, "r16")
    load(running, "r33")
    details = inspect(running, "r16")
    assert (details.adapter.tier, details.adapter.running_requests) == ("host", 0)
    memory = running.engine.built.engine.runner.backend.pull_memory
    check_bytes(running, "r16", details, memory)
    assert inspect(running, "r33").adapter.tier == "device"
    assert sum(details.launches.values()) > 0


def test_what_is_not_resident(start: Callable[..., Running]) -> None:
    running = start(max_loras=1)
    wanted = "adapter acme/r1@3 is not resident; `loadout load acme/r1@3` loads it"

    def refusal() -> str:
        error = running.call(Command.INSPECT_ADAPTER, "r1").error
        assert isinstance(error, AdapterNotFound)
        assert (error.subject, error.reason) == ("ref", "ADAPTER_NOT_FOUND")
        return error.message

    assert refusal() == wanted
    running.store.gate.clear()
    running.engine.send(Call(1000, Command.LOAD, running.digests["r1"]))
    assert refusal() == (
        "adapter acme/r1@3 is still being loaded; `loadout load acme/r1@3` returns once it is "
        "resident"
    )
    running.store.gate.set()
    running.until(lambda: 1000 in running.replies)
    assert inspect(running, "r1").adapter.tier == "device"
    load(running, "r3")  # there is one row
    assert refusal() == wanted
    load(running, "r1")
    assert running.call(Command.UNLOAD, "r1").error is None
    assert refusal() == wanted


def test_one_that_is_used_is_not_disturbed(start: Callable[..., Running]) -> None:
    running = start()
    running.submit("r", PROMPT, "r16", max_tokens=200)
    running.until(lambda: running.outputs.get("r"))
    before = running.engine.built.residency.device.residents()
    details = inspect(running, "r16")
    assert running.engine.built.residency.device.residents() == before
    assert details.adapter.digest == running.digests["r16"]
    assert len(running.result("r")[0]) == 200
    running.check_idle()


def note_programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the list to which each run of a step's program adds how many operations it has."""
    noted: list[int] = []
    run = Program.run

    def noting(program: Program, num_threads: int | None = None) -> None:
        if [op.name for op in program.ops] != ["choose"]:  # the sampler's
            noted.append(len(program.ops))
        run(program, num_threads)

    monkeypatch.setattr(Program, "run", noting)
    return noted


def num_operations(running: Running, noted: list[int], name: str) -> int:
    """Returns how many operations a decode step runs with this adapter."""
    request_id = f"{name}-{len(running.outputs)}"
    running.submit(request_id, PROMPT, name, max_tokens=4)
    running.result(request_id)
    return noted[-1]


@pytest.mark.parametrize("lora_targets", [(), ("q_proj", "v_proj")], ids=["every", "restricted"])
def test_launches_are_what_the_native_program_runs(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, lora_targets: tuple[str, ...]
) -> None:
    noted = note_programs(monkeypatch)
    running = start(lora_targets=lora_targets)
    groups = lora_groups(running.engine.layout)
    base = num_operations(running, noted, "")
    for name in ["r1"] if lora_targets else NAMES:
        operations = num_operations(running, noted, name)
        details = inspect(running, name)
        assert sum(details.launches.values()) == operations - base > 0
        own = set(details.targets.tolist())
        changed = {group for group, each in groups.items() if own & set(each.targets)}
        assert set(details.launches) == changed
        assert details.kernels.startswith("native")


def test_embedding_and_head_have_groups_of_their_own(start: Callable[..., Running]) -> None:
    running = start()
    load(running, "embed")
    launches = inspect(running, "embed").launches
    assert list(launches) == [EMBEDDING, "layers.0.o", "layers.1.o", HEAD]


def test_adapters_of_every_kind(
    tmp_path: Path, start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes the place of the base's weights is computed by operations that are called by the
    names of these."""
    zoo, noted = make_kinds("qwen3", tmp_path), note_programs(monkeypatch)
    running = start(zoo, native_kernels=True, max_added_tokens=len(ADDED))
    layout, replaced = running.engine.layout, set[str]()
    base = num_operations(running, noted, "")
    for name in zoo.adapter_dirs:
        operations = num_operations(running, noted, name)
        details = inspect(running, name)
        assert sum(details.launches.values()) == operations - base > 0, name
        message = to_inspected(details, layout, pb.ResidentAdapter())
        named = {message.targets[index].name for group in message.groups for index in group.targets}
        assert named == {target.name for target in message.targets}, "each is of a group"
        assert all(group.targets for group in message.groups), "nothing is launched for nothing"
        replaced |= details.launches.keys() & layout.weight_indices.keys()
    assert replaced == layout.weight_indices.keys()
