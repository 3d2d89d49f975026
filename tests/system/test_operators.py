"""Load, unload, pin: what operators ask of the engine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from inference_svc.core import EngineConfig, FinishReason
from inference_svc.engine.control.status_types import EngineStatus
from inference_svc.engine.transport.messages import Command, LayoutAccepted
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.errors import AdapterNotFound, AdapterUnavailable, AdapterUnusable, NoRoom
from inference_svc.host.memory import resident_bytes
from tests.support.models.zoo import Zoo
from tests.system.engines import CompilingStore, Running


@pytest.fixture(params=[0, 2 << 20], ids=["arena-only", "host-tier"])
def host_bytes(request: pytest.FixtureRequest) -> int:
    return request.param


def test_load_ahead_then_hit(start: Callable, host_bytes: int) -> None:
    running = start(host_bytes=host_bytes)
    loaded = running.call(Command.LOAD, "r16").result
    assert (loaded.tier, loaded.rank, loaded.pinned) == ("device", 16, False)
    assert loaded.num_bytes > 0
    running.submit("r", [5], "r16", max_tokens=2)
    running.result("r")
    assert running.engine.built.residency.counters.device_hits == 1
    listed = running.call(Command.LIST_RESIDENT).result[0]
    assert listed.digest == running.digests["r16"]
    assert listed.load_seconds > 0


def test_unload_drains_then_frees_every_byte(start: Callable, host_bytes: int) -> None:
    running = start(host_bytes=host_bytes)
    before = running.call(Command.DESCRIBE).result.memory
    running.call(Command.LOAD, "r16")
    running.submit("r", [5], "r16", max_tokens=100)
    running.until(lambda: "r" in running.outputs)
    freed = running.call(Command.UNLOAD, "r16").result
    assert running.is_done("r"), "unload answers when the last user has ended"
    assert len(running.result("r")[0]) == 100
    assert freed > 0
    after = running.call(Command.DESCRIBE).result.memory
    assert (after["arena"], after["host_tier"]) == (before["arena"], before["host_tier"])
    assert isinstance(running.call(Command.UNLOAD, "r16").error, AdapterNotFound)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_unload_while_groups_run_ends(start: Callable, is_cancelled: bool) -> None:
    """sglang#36894: three requests of sixteen answers each, which all finish or are cancelled."""
    running = start(max_sequences=24, kv_bytes=8 << 20)
    ids = [f"{group}-{index}" for group in range(3) for index in range(16)]
    for attempt in range(2):
        names = {request_id: f"{attempt}.{request_id}" for request_id in ids}
        for request_id, name in names.items():
            running.submit(
                *(name, [5, 6, 7, int(request_id[0])], "r16"),
                max_tokens=40,
                group=f"{attempt}.{request_id[0]}",
            )
        running.until(lambda names=names: names["0-0"] in running.outputs)
        if is_cancelled:
            for name in names.values():
                running.cancel(name)
        assert running.call(Command.UNLOAD, "r16").result > 0
        expected = FinishReason.ABORTED if is_cancelled else FinishReason.LENGTH
        for name in names.values():
            assert running.result(name)[1].finish_reason is expected
        running.check_idle()
        if is_cancelled:  # else answers that waited meanwhile have loaded it again
            assert not running.call(Command.LIST_RESIDENT).result


@pytest.mark.parametrize("frees_weights", [False, True])
def test_adapters_outlast_a_sleep(start: Callable, host_bytes: int, frees_weights: bool) -> None:
    """vllm#53888: with one slot, of two adapters one has it and the other was evicted. After the
    sleep both give their own tokens, and so do their requests of before."""
    running = start(max_loras=1, host_bytes=host_bytes)
    expected = {}
    for name in ("r16", "r3", "r16"):
        running.submit(f"before {name}", [5, 6, 7], name, max_tokens=8)
        expected[name] = running.result(f"before {name}")[0]
        running.outputs.clear()
    assert running.engine.built.residency.device.num_evictions == 2
    assert expected["r3"] != expected["r16"]
    running.submit("during", [5, 6, 7], "r16", max_tokens=200)
    running.until(lambda: "during" in running.outputs)
    assert running.call(Command.SLEEP, frees_weights=frees_weights).result > 0
    assert running.call(Command.WAKE).error is None
    for name in ("r3", "r16", "r3"):
        running.submit(f"after {name}", [5, 6, 7], name, max_tokens=8)
        assert running.result(f"after {name}")[0] == expected[name]
        running.outputs.pop(f"after {name}")
    assert running.result("during")[0][:8] == expected["r16"]
    running.check_idle()


def test_requests_that_come_while_it_drains_load_it_again(start: Callable, host_bytes: int) -> None:
    running = start(host_bytes=host_bytes)
    running.submit("first", [5], "r16", max_tokens=100)
    running.until(lambda: "first" in running.outputs)
    reply = running.call(Command.UNLOAD, "r16")
    assert reply.error is None
    running.submit("second", [5], "r16", max_tokens=3)
    assert len(running.result("second")[0]) == 3
    assert running.engine.built.residency.counters.pulls_done == 2


def test_unload_of_what_is_loading_is_refused(start: Callable, host_bytes: int) -> None:
    running = start(host_bytes=host_bytes)
    running.store.gate.clear()
    running.submit("r", [5], "r16", max_tokens=3)
    assert isinstance(running.call(Command.UNLOAD, "r16").error, AdapterUnusable)
    running.store.gate.set()
    assert len(running.result("r")[0]) == 3


def test_an_image_in_the_host_tier_stays_while_it_waits_for_the_device(start: Callable) -> None:
    """r16 is one copy away and waits for device room; the pull of r64 needs host room."""
    running = start(arena_bytes=360 << 10, host_bytes=360 << 10)
    for request_id, name in (("0", "r16"), ("1", "r33")):
        running.submit(request_id, [5], name, max_tokens=2)
        running.result(request_id)
    running.submit("runs", [5], "r33", max_tokens=200)
    running.until(lambda: "runs" in running.outputs)
    for index, name in enumerate(("r16", "r64", "r3", "r16")):
        running.submit(f"w{index}", [5], name, max_tokens=2)
    for request_id in ("w0", "w1", "w2", "w3", "runs"):
        assert running.result(request_id)[1].error is None
    running.check_idle()


class OnceStore(CompilingStore):
    """Makes adapters as they are pulled, by number, and keeps none."""

    def __init__(self, folder: Path, template: Path) -> None:
        super().__init__()
        self._folder = folder
        shutil.copytree(template, folder)
        self._weights = folder / "adapter_model.safetensors"
        self._tensors = load_file(self._weights)

    def make(self, number: int) -> str:
        changed = {name: tensor.clone() for name, tensor in self._tensors.items()}
        changed[min(changed)].view(-1)[0] = number / 64
        save_file(changed, self._weights, {"format": "pt"})
        self.folders.clear()
        self._images.clear()
        return self.register(self._folder)


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_memory_stays_however_many_adapters_there_were(
    zoos: Callable[[str], Zoo], tmp_path: Path, host_bytes: int, count: int
) -> None:
    """vllm-metal#641, NVIDIA/TensorRT-LLM#12815: one slot, and each adapter once."""
    zoo = zoos("llama")
    config = EngineConfig(
        *(zoo.model_dir, "llama"),
        max_model_len=256,
        kv_bytes=4 << 20,
        arena_bytes=1 << 20,
        host_bytes=host_bytes,
        max_loras=1,
        num_threads=1,
    )
    store = OnceStore(tmp_path / "adapter", zoo.adapter_dirs["r1"])
    engine = EngineThread(config, store)
    running = Running(engine, store, {})
    engine.start(running.on_outputs)
    engine.send(LayoutAccepted(store.register_layout(engine.layout)))
    before = 0
    for number in range(count):
        if number == count // 4:
            before = resident_bytes()
        running.submit("r", [5, 6], store.make(number), max_tokens=2)
        assert running.result("r")[1].error is None
        running.outputs.clear()
    grown = resident_bytes() - before
    assert engine.built.residency.device.num_evictions == count - 1
    running.check_idle()
    engine.stop()
    assert grown < 8 << 20


def test_a_pinned_adapter_stays(start: Callable) -> None:
    running = start(max_loras=3, max_lora_rank=16)
    assert running.call(Command.LOAD, "r3", pin=True).result.pinned
    for name in ("r1", "r8", "r16", "embed", "r1", "r8"):
        running.submit(name, [5], name, max_tokens=2)
        assert running.result(name)[1].error is None
        running.outputs.clear()
    digests = {r.digest for r in running.call(Command.LIST_RESIDENT).result}
    assert running.digests["r3"] in digests
    assert isinstance(running.call(Command.UNLOAD, "r3").error, AdapterUnusable)
    assert running.call(Command.UNPIN, "r3").result.pinned is False
    assert running.call(Command.UNLOAD, "r3").result > 0


def test_a_pin_that_would_block_others_is_refused(start: Callable) -> None:
    """The arena holds one adapter of max_lora_rank and not two."""
    running = start(max_lora_rank=64, arena_bytes=700 << 10)
    reply = running.call(Command.LOAD, "r64", pin=True)
    assert isinstance(reply.error, NoRoom)
    assert isinstance(running.call(Command.PIN, "r1").error, AdapterNotFound)


def test_a_rank_above_the_limit_is_refused(start: Callable) -> None:
    running = start(max_lora_rank=16)
    error = running.call(Command.LOAD, "r33").error
    assert isinstance(error, AdapterUnusable)
    assert "rank 33" in error.message
    running.check_idle()


def test_load_answers_errors(start: Callable) -> None:
    running = start(adapter_wait_s=0.2)
    assert isinstance(running.call(Command.LOAD, "sha256:none").error, AdapterNotFound)
    running.store.is_down = True
    began = time.monotonic()
    error = running.call(Command.LOAD, "r16").error
    assert isinstance(error, AdapterUnavailable)
    assert error.message.startswith("adapter acme/r16@3 cannot be loaded, no byte of it arrived")
    assert "0.2 s: the store is down, for 0 s now; try again later" in error.message
    assert time.monotonic() - began < 20
    running.check_idle()


def test_describe_says_where_the_memory_is(start: Callable) -> None:
    running = start()
    running.submit("r", [5] * 40, "r16", max_tokens=100)
    running.until(lambda: "r" in running.outputs)
    status: EngineStatus = running.call(Command.DESCRIBE).result
    assert status.num_running == 1
    assert status.running_digests == (running.digests["r16"],)
    on_device = {"weights", "kv_pages", "arena", "workspace"}
    assert set(status.memory) == {*on_device, "host_tier", "process"}
    for used, capacity in status.memory.values():
        assert 0 <= used <= capacity
    assert status.memory["kv_pages"][0] > 0
    assert status.counters["pulls"] == 1
