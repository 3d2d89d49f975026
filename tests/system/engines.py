"""Engines in this process, over real images and an adapter store without a wire."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adapter_store.api import convert as store_convert
from adapter_store.api.pull_messages import to_pull_response
from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.images.compile import Image, compile_image
from adapter_store.images.plan.layout import layout_id
from contract.images.header import ImageChunk, ImageTrailer, LayerEnd, PullMessage
from contract.images.layouts import Layout
from inference_svc.adapters.layout import ModelLayout
from inference_svc.core import AdapterKey, Request, Sum
from inference_svc.engine.transport.messages import (
    Call,
    Cancel,
    Command,
    Output,
    PauseMode,
    Reply,
    StepOutputs,
    Submit,
)
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.errors import AdapterNotFound, StoreUnavailable
from inference_svc.store.convert import from_layout, to_pull_message
from tests.support.inference.memory_store import MemoryMapping
from tests.support.inference.results import asking
from tests.support.wait import until

DEFAULTS: dict[str, Any] = {
    "max_model_len": 256,
    "kv_bytes": 4 << 20,
    "arena_bytes": 4 << 20,
    "num_threads": 1,
}
"""The sizes of engines that tests start."""


@dataclass
class Stream:
    """A pull of a compiled image; stops at once when cancelled or when the store is down."""

    store: CompilingStore
    digest: str
    layout_id: str
    offset: int
    image_id: str
    cancelled: threading.Event = field(default_factory=threading.Event)
    source: str = "memory"
    mapped: MemoryMapping | None = None

    def cancel(self) -> None:
        self.cancelled.set()

    def __iter__(self) -> Iterator[PullMessage]:
        try:
            yield from self._gated_messages()
        finally:
            if self.mapped is not None:
                self.mapped.release()

    def _gated_messages(self) -> Iterator[PullMessage]:
        for message in self._messages():
            while not self.store.gate.wait(0.005):
                if self.cancelled.is_set():
                    raise StoreUnavailable("cancelled")
            if self.cancelled.is_set():
                raise StoreUnavailable("cancelled")
            if self.store.is_down:
                self.store.num_failed += 1
                raise StoreUnavailable("the store is down")
            yield message

    def _messages(self) -> Iterator[PullMessage]:
        image = self.store.image(self.digest, self.layout_id)
        start = self.offset if self.image_id == image.plan.image_id else 0
        data = image.buffer.numpy().tobytes()
        plan = image.plan
        if self.store.maps and not start:
            self.mapped = MemoryMapping(data)
        header = replace(plan.header(), layout_id=self.layout_id, offset=start)
        yield to_pull_message(to_pull_response(header))
        for part in image.parts:
            if part.start >= start:
                if self.mapped is None:
                    yield ImageChunk(part.start, data[part.start : part.end])
                yield LayerEnd(part.index, part.end, part.sha256)
        yield ImageTrailer(image.sha256)


@dataclass
class CompilingStore:
    """The adapter store without a wire: real checkpoints, real images. Test double of transport
    only. While `gate` is clear, pulls wait; while `is_down`, they fail, and `num_failed` counts
    them. With `maps` images are mapped, and not sent."""

    folders: dict[str, Path] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    is_down: bool = False
    maps: bool = False
    num_failed: int = 0
    _images: dict[tuple[str, str], Image] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.gate.set()

    def register(self, folder: Path) -> str:
        digest = open_checkpoint(folder).digest
        self.folders[digest] = folder
        return digest

    def register_layout(self, layout: ModelLayout) -> str:
        announced = store_convert.from_layout(from_layout(layout))
        made = replace(announced, image_format=layout.image_formats[-1])
        name = layout_id(made)
        self.layouts[name] = made
        return name

    @property
    def layout(self) -> Layout:
        """The one that was registered first: of an engine, or its first rank."""
        return next(iter(self.layouts.values()))

    def image(self, digest: str, layout_id: str = "") -> Image:
        """Returns an adapter's image for a layout, which is the first unless it is named."""
        with self._lock:
            if digest not in self.folders:
                raise AdapterNotFound(f"no adapter {digest}", subject="digest")
            key = digest, layout_id or next(iter(self.layouts))
            if key not in self._images:
                checkpoint = open_checkpoint(self.folders[digest])
                self._images[key] = compile_image(checkpoint, self.layouts[key[1]])
            return self._images[key]

    def put(self, digest: str, image: Image) -> None:
        """Adds an image for the first layout."""
        self._images[digest, next(iter(self.layouts))] = image

    def pull(
        self, digest: str, layout_id: str, offset: int = 0, image_id: str = "", avoid: object = ()
    ) -> Stream:
        return Stream(self, digest, layout_id, offset, image_id)

    def save(self, path: Path) -> None:
        """Writes down what is registered, for `SavedStore`."""
        path.write_bytes(pickle.dumps((self.folders, self.layouts)))


@dataclass(frozen=True)
class SavedStore:
    """Makes the stores of other ranks, which have what is saved at `path` when they pull."""

    path: Path

    def __call__(self, publish: Callable[[Any], None]) -> SavedStore:
        return self

    def on_update(self, content: object) -> None:
        """Has no replicas."""

    def pull(
        self, digest: str, layout_id: str, offset: int = 0, image_id: str = "", avoid: object = ()
    ) -> Stream:
        folders, layouts = pickle.loads(self.path.read_bytes())
        return CompilingStore(folders, layouts).pull(digest, layout_id, offset, image_id)


def label_of(adapter: str) -> str:
    """Returns the name in errors of an adapter; "" for the base model, and a digest."""
    return f"acme/{adapter}@3" if adapter and ":" not in adapter else ""


@dataclass
class Running:
    """An engine in its thread, and its outputs."""

    engine: EngineThread
    store: CompilingStore
    digests: dict[str, str]
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    num_calls: int = 0

    def on_outputs(self, step: StepOutputs) -> None:
        with self.changed:
            for output in step.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            for reply in step.replies:
                self.replies[reply.call_id] = reply
            self.changed.notify_all()

    def submit(
        self, request_id: str, prompt: Sequence[int], adapter: str | Sum = "", **options: Any
    ) -> None:
        assert not self.is_done(request_id), "its outputs would be taken for the new request's"
        sampling = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
        fields = {"cache_seed", "priority", "deadline_s", "activation", "group", "grammar"}
        fields |= {"tenant", "version_policy", "budget", "pictures"}
        key: AdapterKey = adapter
        names: tuple[str, ...] = ()
        if not isinstance(adapter, Sum):
            key, label = self.digests.get(adapter, adapter), label_of(adapter)
            names = (label,) if label else ()
        request = Request(
            request_id,
            tuple(prompt),
            key=key,
            names=names,
            arrival_s=time.monotonic(),
            **{k: v for k, v in options.items() if k in fields},
            **asking(sampling | {k: v for k, v in options.items() if k not in fields}),
        )
        self.engine.send(Submit(request))

    def cancel(self, request_id: str) -> None:
        self.engine.send(Cancel(request_id))

    def call(self, command: Command, adapter: str = "", pin: bool = False, **options: Any) -> Reply:
        self.num_calls += 1
        number = self.num_calls
        digest = self.digests.get(adapter, adapter)
        self.engine.send(Call(number, command, digest, pin, adapter=label_of(adapter), **options))
        self.until(lambda: number in self.replies)
        return self.replies.pop(number)

    @contextmanager
    def together(self, *adapters: str) -> Iterator[None]:
        """Holds the engine while requests are submitted, so that all compete for its memory: a busy
        machine may end each one before the next comes. These adapters are loaded before."""
        for adapter in adapters:
            assert self.call(Command.LOAD, adapter).error is None
        self.call(Command.PAUSE, pause_mode=PauseMode.KEEP)
        yield
        self.call(Command.RESUME)

    def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), "nothing happened"

    def is_done(self, request_id: str) -> bool:
        outputs = self.outputs.get(request_id)
        return bool(outputs) and outputs[-1].is_last

    def result(self, request_id: str) -> tuple[list[int], Output]:
        """All tokens of a request, and its last output."""
        self.until(lambda: self.is_done(request_id))
        outputs = self.outputs[request_id]
        return [token for output in outputs for token in output.token_ids], outputs[-1]

    def check_idle(self) -> None:
        """Asserts that nothing is held: no page, no pin, no waiter, no load."""
        built = self.engine.built
        until(lambda: built.residency.loads.num_jobs == 0)
        built.engine.check_integrity()
        assert built.engine.scheduler.states.num_used == 0
        assert not built.engine.sequences
        assert all(r.users == 0 for r in built.residency.device.residents())
        assert not built.residency.waiters


def check_case_happened(case: str, running: Any) -> None:
    """A case that did not do what its name says proves nothing."""
    built = running.engine.built
    if case.startswith("preemption"):
        assert built.engine.scheduler.num_preemptions > 0
    if case in ("small-arena", "two-slots", "host-tier", "small-host-tier"):
        assert built.residency.device.num_evictions > 0
    if case == "host-tier":
        assert built.residency.counters.host_hits > 0
    if case == "small-host-tier":
        assert built.residency.host.slots.num_evictions > 0
