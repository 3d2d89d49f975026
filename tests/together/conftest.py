"""Random models and PEFT adapters, real images compiled from them, and engines that serve them."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from adapter_store import core as store_core
from adapter_store.checkpoint import open_checkpoint
from adapter_store.image import Image, compile_image
from adapter_store.layout import layout_id
from inference_svc.adapters.layout import ModelLayout
from inference_svc.adapters.store import (
    ImageChunk,
    ImageHeader,
    ImageTrailer,
    LayerEnd,
    PullMessage,
    Segment,
)
from inference_svc.core import (
    Call,
    Cancel,
    Command,
    LayoutAccepted,
    Output,
    Reply,
    Request,
    SamplingParams,
    StepOutputs,
    Submit,
)
from inference_svc.engine.config import EngineConfig
from inference_svc.engine.handle import EngineThread
from inference_svc.errors import AdapterNotFound, StoreUnavailable

VOCAB = 128
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 24}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": (
        "Qwen3",
        {
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
}


@dataclass(frozen=True)
class AdapterSpec:
    """A random PEFT adapter: `options` go to LoraConfig."""

    name: str
    rank: int
    targets: Sequence[str] | str
    options: dict[str, Any] = field(default_factory=dict)


SPECS = (
    AdapterSpec("r1", 1, ["q_proj", "v_proj"]),
    AdapterSpec("r3", 3, ALL, {"use_rslora": True}),
    AdapterSpec("r8", 8, ["down_proj"], {"layers_to_transform": [1]}),
    AdapterSpec("r16", 16, ALL),
    AdapterSpec("r33", 33, ["o_proj", "gate_proj", "k_proj"], {"rank_pattern": {"k_proj": 5}}),
    AdapterSpec(
        "r64", 64, ["q_proj", "up_proj", "down_proj"], {"alpha_pattern": {"layers.1.mlp.*": 200}}
    ),
    AdapterSpec("embed", 4, ["embed_tokens", "lm_head", "o_proj"]),
)


@dataclass
class Zoo:
    """One random model with its adapters, in the form of transformers + peft and on disk."""

    model_dir: Path
    reference: Any
    adapter_dirs: dict[str, Path]

    def logits(self, adapter: str, token_ids: list[int], dtype: torch.dtype) -> torch.Tensor:
        """[len(token_ids), vocab] of the oracle; adapter "" is the base model."""
        model = self.reference
        if dtype != torch.float32:
            model = copy.deepcopy(model).to(dtype)
        with torch.no_grad():
            if adapter:
                model.set_adapter(adapter)
                out = model(torch.tensor([token_ids]))
            else:
                with model.disable_adapter():
                    out = model(torch.tensor([token_ids]))
        return out.logits[0].float()

    def greedy(self, adapter: str, prompt: list[int], count: int) -> list[int]:
        """What the oracle continues with, in fp32, past any end token."""
        model = self.reference
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
        with torch.no_grad():
            if adapter:
                model.set_adapter(adapter)
                out = model.generate(input_ids=torch.tensor([prompt]), **options)
            else:
                with model.disable_adapter():
                    out = model.generate(input_ids=torch.tensor([prompt]), **options)
        return out[0, len(prompt) :].tolist()


def make_zoo(kind: str, folder: Path, specs: Sequence[AdapterSpec] = SPECS) -> Zoo:
    prefix, options = MODELS[kind]
    torch.manual_seed(7)
    config = getattr(transformers, f"{prefix}Config")(**(_SHAPE | options))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    _shake_norms_and_biases(model)
    model.generation_config.eos_token_id = 2
    model.name_or_path = model.config.name_or_path = kind
    model.save_pretrained(folder / "model")
    reference: Any = None
    dirs = {}
    for spec in specs:
        lora = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=2 * spec.rank,
            target_modules=spec.targets,
            base_model_name_or_path=kind,
            **spec.options,
        )
        with warnings.catch_warnings():
            # Advice about merging into tied embeddings; nothing is merged here.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            if reference is None:
                reference = peft.get_peft_model(model, lora, adapter_name=spec.name)
            else:
                reference.add_adapter(spec.name, lora)
    for name, parameter in reference.named_parameters():
        if "lora_" in name:  # so that a change is about 0.04 per weight, whatever the rank
            torch.nn.init.normal_(parameter, std=0.14 / min(parameter.shape) ** 0.25)
    reference.save_pretrained(folder / "adapters", save_embedding_layers=False)
    for spec in specs:
        dirs[spec.name] = folder / "adapters" / spec.name
    return Zoo(folder / "model", reference.eval(), dirs)


def _shake_norms_and_biases(model: torch.nn.Module) -> None:
    """Initialisation leaves them at one and zero, which would hide a missing one."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.2)


@dataclass
class Stream:
    """A pull of a compiled image; stops at once when cancelled or when the store is down."""

    store: CompilingStore
    digest: str
    offset: int
    image_id: str
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()

    def __iter__(self) -> Iterator[PullMessage]:
        for message in self._messages():
            while not self.store.gate.wait(0.005):
                if self.cancelled.is_set():
                    raise StoreUnavailable("cancelled")
            if self.cancelled.is_set() or self.store.is_down:
                raise StoreUnavailable("the store is down")
            yield message

    def _messages(self) -> Iterator[PullMessage]:
        image = self.store.image(self.digest)
        start = self.offset if self.image_id == image.plan.image_id else 0
        data = image.buffer.numpy().tobytes()
        plan = image.plan
        yield ImageHeader(
            plan.image_id,
            plan.digest,
            self.store.layout_id,
            plan.image_format,
            plan.total_bytes,
            tuple(
                Segment(s.target, s.kind.value, s.rank, s.offset, s.length_bytes)
                for s in plan.segments
            ),
            start,
        )
        for part in image.parts:
            if part.start >= start:
                yield ImageChunk(part.start, data[part.start : part.end])
                yield LayerEnd(part.index, part.end, part.sha256)
        yield ImageTrailer(image.sha256)


@dataclass
class CompilingStore:
    """The adapter store without a wire: real checkpoints, real images. Test double of transport
    only. While `gate` is clear, pulls wait; while `is_down`, they fail."""

    folders: dict[str, Path] = field(default_factory=dict)
    layout: store_core.Layout | None = None
    layout_id: str = ""
    gate: threading.Event = field(default_factory=threading.Event)
    is_down: bool = False
    _images: dict[str, Image] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.gate.set()

    def register(self, folder: Path) -> str:
        digest = open_checkpoint(folder).digest
        self.folders[digest] = folder
        return digest

    def register_layout(self, layout: ModelLayout) -> str:
        dtypes = {
            torch.float32: store_core.DataType.FLOAT32,
            torch.bfloat16: store_core.DataType.BFLOAT16,
            torch.float16: store_core.DataType.FLOAT16,
        }
        targets = tuple(
            store_core.Target(
                t.name,
                t.layer,
                t.group,
                store_core.TargetKind(t.kind),
                t.in_features,
                t.out_features,
            )
            for t in layout.targets
        )
        self.layout = store_core.Layout(
            layout.base_model,
            layout.aliases,
            layout.config_sha256,
            dtypes[layout.dtype],
            1,
            targets,
        )
        self.layout_id = layout_id(self.layout)
        return self.layout_id

    def image(self, digest: str) -> Image:
        with self._lock:
            if digest not in self.folders:
                raise AdapterNotFound(f"no adapter {digest}", subject="digest")
            if digest not in self._images:
                assert self.layout is not None
                checkpoint = open_checkpoint(self.folders[digest])
                self._images[digest] = compile_image(
                    checkpoint, self.layout, base_model=self.layout.base_model
                )
            return self._images[digest]

    def pull(self, digest: str, layout_id: str, offset: int = 0, image_id: str = "") -> Stream:
        return Stream(self, digest, offset, image_id)


@dataclass
class Running:
    """An engine in its thread, and what it said."""

    engine: EngineThread
    store: CompilingStore
    digests: dict[str, str]
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    replies: dict[int, Reply] = field(default_factory=dict)
    news: threading.Condition = field(default_factory=threading.Condition)
    num_calls: int = 0

    def hear(self, said: StepOutputs) -> None:
        with self.news:
            for output in said.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            for reply in said.replies:
                self.replies[reply.call_id] = reply
            self.news.notify_all()

    def submit(
        self, request_id: str, prompt: Sequence[int], adapter: str = "", **options: Any
    ) -> None:
        sampling = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
        fields = {"cache_seed", "priority", "deadline_s"}
        request = Request(
            request_id,
            tuple(prompt),
            SamplingParams(**(sampling | {k: v for k, v in options.items() if k not in fields})),
            digest=self.digests.get(adapter, adapter),
            arrival_s=time.monotonic(),
            **{k: v for k, v in options.items() if k in fields},
        )
        self.engine.send(Submit(request))

    def cancel(self, request_id: str) -> None:
        self.engine.send(Cancel(request_id))

    def call(self, command: Command, adapter: str = "", pin: bool = False) -> Reply:
        self.num_calls += 1
        number = self.num_calls
        self.engine.send(Call(number, command, self.digests.get(adapter, adapter), pin))
        self.until(lambda: number in self.replies)
        return self.replies.pop(number)

    def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
        with self.news:
            assert self.news.wait_for(condition, timeout_s), "nothing happened"

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
        deadline = time.monotonic() + 10
        while built.residency.num_loading and time.monotonic() < deadline:
            time.sleep(0.01)
        assert built.residency.num_loading == 0
        built.engine.check_integrity()
        assert built.engine.scheduler.pages.num_used == 0
        assert not built.engine.sequences
        assert all(r.users == 0 for r in built.residency.device.residents())
        assert not built.residency._waiters


@pytest.fixture(scope="session")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Zoo]:
    """Models by kind, each made once."""
    made: dict[str, Zoo] = {}

    def zoo(kind: str) -> Zoo:
        if kind not in made:
            made[kind] = make_zoo(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return zoo


@pytest.fixture
def start(zoos: Callable[[str], Zoo]) -> Iterator[Callable[..., Running]]:
    """Starts engines over a zoo; all are stopped, and found whole, at the end of the test."""
    running: list[Running] = []

    def begin(kind: str = "llama", **changes: Any) -> Running:
        zoo = zoos(kind)
        store = CompilingStore()
        digests = {name: store.register(folder) for name, folder in zoo.adapter_dirs.items()}
        defaults = EngineConfig(
            zoo.model_dir,
            kind,
            max_model_len=256,
            kv_bytes=4 << 20,
            arena_bytes=4 << 20,
            num_threads=1,
        )
        engine = EngineThread(replace(defaults, **changes), store)
        made = Running(engine, store, digests)
        engine.start(made.hear)
        engine.send(LayoutAccepted(store.register_layout(engine.layout)))
        running.append(made)
        return made

    yield begin
    for made in running:
        made.store.gate.set()
        made.engine.stop()
        made.engine.built.engine.check_integrity()


__all__ = ["ALL", "MODELS", "SPECS", "AdapterSpec", "CompilingStore", "Running", "Zoo"]
