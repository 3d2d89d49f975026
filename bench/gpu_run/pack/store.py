"""Reads the pack, except its peers: the demo's model, its adapters' images, recorded tokens."""

from __future__ import annotations

import hashlib
import json
import queue
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bench.gpu_run.context import Missing
from bench.gpu_run.pack import safetensors
from contract.images.dtypes import DataType
from contract.images.header import (
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    LayerEnd,
    PullMessage,
    Segment,
)
from contract.images.segment_kinds import SegmentKind
from inference_svc.adapters.layout import ModelLayout
from inference_svc.core import EngineConfig, Request, SamplingParams
from inference_svc.engine.transport.messages import LayoutAccepted, Message, StepOutputs, Submit

MANIFEST, MODEL, IMAGES, RECORDED, PEERS = (
    "pack.json",
    "model",
    "images",
    "recorded.json",
    "peers",
)
BASE_MODEL, LAYOUT_ID = "loadout-demo", "pack"
MAX_RANK, MAX_MODEL_LEN = 32, 128


def read_manifest(pack: Path) -> dict[str, Any]:
    """Returns the pack's facts. Raises Missing without a pack."""
    path = pack / MANIFEST
    if not path.is_file():
        raise Missing(f"there is no pack at {pack}: run `make gpu-pack` and copy it here")
    return dict(json.loads(path.read_text()))


class Recorded(NamedTuple):
    """A request, and its tokens from a CPU."""

    request: Request
    token_ids: tuple[int, ...]


def read_recorded(pack: Path) -> list[Recorded]:
    return [
        Recorded(make_request(each), tuple(each["token_ids"]))
        for each in json.loads((pack / RECORDED).read_text())
    ]


def make_request(facts: dict[str, Any]) -> Request:
    """Makes a request from its JSON in a recording."""
    sampling = SamplingParams(
        max_tokens=facts["max_tokens"],
        temperature=facts["temperature"],
        top_p=facts["top_p"],
        seed=facts["seed"],
    )
    prompt, digest = tuple(facts["prompt_token_ids"]), facts["digest"]
    return Request(facts["request_id"], prompt, sampling, digest, arrival_s=time.monotonic())


def engine_config(pack: Path, device: str, **others: Any) -> EngineConfig:
    """Returns the config of an engine for the recorded requests, in fp32, with sizes that fit the
    demo's model."""
    settings: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_sequences": 32,
        "max_batch_tokens": 256,
        "max_prefill_chunk": 256,
        "kv_bytes": 64 << 20,
        "arena_bytes": 16 << 20,
        "max_loras": 8,
        "max_lora_rank": MAX_RANK,
        "prefetch": False,
        "adapter_wait_s": 600.0,
    }
    return EngineConfig(pack / MODEL, BASE_MODEL, device=device, **settings | others)


@dataclass(frozen=True)
class PackStore:
    """An `AdapterStore` over the pack's images; it pickles."""

    pack: Path

    def pull(
        self, digest: str, layout_id: str, offset: int = 0, image_id: str = "", avoid: object = ()
    ) -> PackStream:
        return PackStream(self.pack / IMAGES, digest)

    def accept_layout(self, layout: ModelLayout) -> str:
        return LAYOUT_ID

    def close(self) -> None:
        """Does nothing, because nothing is open."""

    def on_update(self, content: object) -> None:
        """Does nothing, because no update comes."""


def make_store(pack: Path) -> PackStore:
    """Makes the store in the engine's process, and makes sure that the process can read the
    model."""
    safetensors.install_if_missing()
    return PackStore(pack)


class PackStream:
    """One pull, from the beginning."""

    source, mapped = "pack", None

    def __init__(self, folder: Path, digest: str) -> None:
        self._facts = json.loads((folder / f"{digest}.json").read_text())
        self._data = (folder / f"{digest}.bin").read_bytes()

    def cancel(self) -> None:
        """Does nothing, because a pull never blocks."""

    def __iter__(self) -> Generator[PullMessage]:
        facts = self._facts
        segments = tuple(
            Segment(
                **each
                | {
                    "kind": SegmentKind(each["kind"]),
                    "dtype": DataType(each["dtype"]),
                    "shape": tuple(each["shape"]),
                }
            )
            for each in facts["segments"]
        )
        digest = facts["digest"]
        yield ImageHeader(
            digest, digest, LAYOUT_ID, facts["image_format"], len(self._data), segments
        )
        hashes = []
        for index, start, end in facts["parts"]:
            data = self._data[start:end]
            hashes.append(hashlib.sha256(data).digest())
            yield ImageChunk(start, data)
            yield LayerEnd(index, end, hashes[-1])
        yield ImageTrailer(hashlib.sha256(b"".join(hashes)).digest())


class RunningEngine(Protocol):
    """An `EngineThread`, or an `EngineProcess`."""

    def start(self, on_outputs: Callable[[StepOutputs], None]) -> None: ...
    def send(self, message: Message) -> None: ...
    def stop(self) -> None: ...


def generate(
    engine: RunningEngine, requests: Sequence[Request], timeout_s: float, num_ranks: int = 1
) -> dict[str, tuple[int, ...]]:
    """Starts the engine, sends all requests at once, and stops it; returns the tokens by request.

    Raises TimeoutError, and a request's error.
    """
    outputs: queue.SimpleQueue[StepOutputs] = queue.SimpleQueue()
    engine.start(outputs.put)
    end_s = time.monotonic() + timeout_s
    try:
        engine.send(LayoutAccepted(LAYOUT_ID, (LAYOUT_ID,) * (num_ranks - 1)))
        for request in requests:
            engine.send(Submit(request))
        tokens: dict[str, tuple[int, ...]] = {r.request_id: () for r in requests}
        num_open = len(requests)
        while num_open:
            try:
                step = outputs.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                message = f"{num_open} of {len(requests)} requests are open after {timeout_s:.0f} s"
                raise TimeoutError(message) from None
            if step.failure is not None:
                raise step.failure
            for output in step.outputs:
                if output.error is not None:
                    raise output.error
                tokens[output.request_id] += output.token_ids
                num_open -= output.is_last
        return tokens
    finally:
        engine.stop()
