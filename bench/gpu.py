"""What the path on a GPU costs: kernels, decode with and without adapters, the load of an adapter.

    python -m bench.gpu

One process, the Llama-3-8B shape in bf16 with random weights, about 30 GB of device memory. Needs
a CUDA device, torch and Triton, no network; vLLM's kernels are measured beside ours where a `vllm`
wheel is installed. Ends with status 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import results
from inference_svc import core
from inference_svc.adapters.arena import Arena
from inference_svc.adapters.image_source import ImageHeader, Segment
from inference_svc.adapters.layout import ModelLayout, build_layout, lora_groups
from inference_svc.adapters.resident import Resident
from inference_svc.adapters.slots import Slots
from inference_svc.adapters.tiers import HostCopy, HostTier, TableClear, TableWrite
from inference_svc.backends.cuda import CudaBackend, StepLimits
from inference_svc.backends.cuda_graphs import CudaRecorder
from inference_svc.model.decoder import Transformer
from inference_svc.model.geometry import ModelGeometry, load_geometry
from inference_svc.model.layers import Linear, RMSNorm
from inference_svc.model.weights import LayerWeights, ModelWeights
from kernels.attention import KVCache

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SMALL = {"num_hidden_layers": 2, "vocab_size": 4096}
DTYPE, PAGE_SIZE, MAX_ROWS, MAX_TOKENS, CONTEXT = torch.bfloat16, 16, 32, 2048, 512
RANK, NUM_ADAPTERS = 16, 32
STEPS, WARM_UP_STEPS = 40, 5


def random_model(geometry: ModelGeometry) -> Transformer:
    g = geometry

    def linear(num_out: int, num_in: int) -> Linear:
        weight = torch.empty(num_out, num_in, dtype=DTYPE, device="cuda")
        return Linear(weight.normal_(std=num_in**-0.5))

    def norm() -> RMSNorm:
        return RMSNorm(torch.ones(g.hidden_size, dtype=DTYPE, device="cuda"), g.rms_norm_eps)

    layers = tuple(
        LayerWeights(
            input_norm=norm(),
            qkv=linear(g.q_size + 2 * g.kv_size, g.hidden_size),
            q_norm=None,
            k_norm=None,
            o=linear(g.hidden_size, g.q_size),
            post_attention_norm=norm(),
            gate_up=linear(2 * g.intermediate_size, g.hidden_size),
            down=linear(g.hidden_size, g.intermediate_size),
        )
        for _ in range(g.num_layers)
    )
    embedding, head = (linear(g.vocab_size, g.hidden_size) for _ in range(2))
    num_bytes = 2 * head.num_bytes
    for layer in layers:
        num_bytes += sum(p.num_bytes for p in (layer.qkv, layer.o, layer.gate_up, layer.down))
    weights = ModelWeights(embedding.weight, layers, norm(), head, num_bytes)
    return Transformer(g, weights)


def image_of(layout: ModelLayout, digest: str) -> ImageHeader:
    """An adapter of RANK on every projection."""
    segments, end = [], 0
    for index, target in enumerate(layout.targets):
        if target.layer is None:
            continue
        for kind, features in (("a", target.in_features), ("b", target.out_features)):
            length = RANK * features * DTYPE.itemsize
            segments.append(Segment(index, kind, RANK, end, length))
            end += -(-length // 256) * 256
    return ImageHeader(digest, digest, "", 1, end, tuple(segments))


class Served:
    """The model with NUM_ADAPTERS adapters in host memory and room for as many in the arena."""

    def __init__(self, geometry: ModelGeometry) -> None:
        self.transformer = random_model(geometry)
        self.layout = build_layout(geometry, "bench", (), DTYPE)
        images = [image_of(self.layout, str(index)) for index in range(NUM_ADAPTERS)]
        self.image_bytes = images[0].total_bytes
        self.host = HostTier(NUM_ADAPTERS * self.image_bytes, pin_memory=True)
        self.host.slab.view(DTYPE).normal_(std=0.02)
        slots = Slots(NUM_ADAPTERS * self.image_bytes, NUM_ADAPTERS)
        self.arena = Arena(
            self.layout,
            NUM_ADAPTERS * self.image_bytes,
            NUM_ADAPTERS,
            RANK,
            torch.device("cuda"),
            self.host.slab,
        )
        self.images: list[tuple[Resident, Resident]] = []
        for image in images:
            hosted, reserved = self.host.slots.reserve(image), slots.reserve(image)
            assert hosted is not None
            assert reserved is not None
            self.images.append((hosted.resident, reserved.resident))
        g = geometry
        self.cache = KVCache.allocate(
            num_layers=g.num_layers,
            num_pages=MAX_ROWS * (CONTEXT // PAGE_SIZE + 8) + 1,
            page_size=PAGE_SIZE,
            num_kv_heads=g.num_kv_heads,
            head_dim=g.head_dim,
            dtype=DTYPE,
            device="cuda",
        )

    def load(self, index: int) -> None:
        """Copied, waited for, and made visible."""
        host, resident = self.images[index]
        self.arena.apply([HostCopy(host, resident)])
        while not self.arena.pop_completed_copies():
            pass
        self.arena.apply([TableWrite(resident)])

    def model(self, *, is_captured: bool) -> CudaBackend:
        limits = StepLimits(MAX_TOKENS, MAX_ROWS, CONTEXT // PAGE_SIZE + 8)
        record, groups = CudaRecorder() if is_captured else None, lora_groups(self.layout)
        model = CudaBackend(self.transformer, self.cache, self.arena, groups, limits, record)
        model.warm_up()
        return model


def sequences(num_rows: int, num_adapters: int) -> list[core.Sequence]:
    made = []
    num_pages = CONTEXT // PAGE_SIZE + 8
    for row in range(num_rows):
        tokens = tuple(range(1, CONTEXT + 1))
        sequence = core.Sequence(core.Request(str(row), tokens, core.SamplingParams()))
        sequence.page_ids = list(range(row * num_pages, (row + 1) * num_pages))
        sequence.slot = row % num_adapters if num_adapters else core.BASE_SLOT
        made.append(sequence)
    return sorted(made, key=lambda sequence: sequence.slot)


@torch.inference_mode()
def step_times(
    model: CudaBackend,
    rows: list[core.Sequence],
    before_step: Callable[[], None] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Seconds of each step up to its tokens, and of the host's part before them."""
    whole, host = [], []
    for index in range(WARM_UP_STEPS + STEPS):
        batch = core.Batch(
            tuple(core.BatchRow(s, len(s.token_ids) - 1, 1, samples=True) for s in rows)
        )
        begin = time.perf_counter()
        before_step()
        logits = model.forward(model.prepare(batch))
        queued = time.perf_counter()
        assert logits.argmax is not None
        tokens = logits.argmax.tolist()
        end = time.perf_counter()
        for sequence, token in zip(rows, tokens, strict=True):
            sequence.token_ids.append(token)
        if index >= WARM_UP_STEPS:
            whole.append(end - begin)
            host.append(queued - begin)
    return whole, host


def decode(served: Served) -> list[dict[str, Any]]:
    found = []
    for is_captured in (True, False):
        model = served.model(is_captured=is_captured)
        for num_rows in (1, 8, 32):
            for num_adapters in sorted({min(n, num_rows) for n in (0, 1, 32)}):
                rows = sequences(num_rows, num_adapters)
                whole, host = step_times(model, rows)
                step_s = statistics.median(whole)
                found.append(
                    {
                        "captured": is_captured,
                        "rows": num_rows,
                        "adapters": num_adapters,
                        "step_ms": step_s * 1e3,
                        "host_ms": statistics.median(host) * 1e3,
                        "tokens_per_s": num_rows / step_s,
                    }
                )
        del model
        torch.cuda.empty_cache()
    return found


def load(served: Served) -> dict[str, Any]:
    """One adapter from host memory to the arena, visible to kernels; alone."""
    seconds: list[float] = []
    for index in range(NUM_ADAPTERS):
        served.arena.apply([TableClear(index)])
        torch.cuda.synchronize()
        begin = time.perf_counter()
        served.load(index)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    median_s = statistics.median(seconds)
    return {
        "image_bytes": served.image_bytes,
        "load_ms": median_s * 1e3,
        "gb_per_s": served.image_bytes / median_s / 1e9,
    }


@torch.inference_mode()
def decode_under_loads(served: Served) -> dict[str, Any]:
    """Steps of 32 rows with 16 adapters while others are copied one after the other, beside the
    same steps alone."""
    model, arena = served.model(is_captured=True), served.arena
    rows = sequences(MAX_ROWS, NUM_ADAPTERS // 2)
    alone, _ = step_times(model, rows)
    loads: list[int] = []
    next_index = NUM_ADAPTERS // 2

    def keep_loading() -> None:
        nonlocal next_index
        if loads and not arena.pop_completed_copies():
            return
        next_index = NUM_ADAPTERS // 2 + (next_index + 1) % (NUM_ADAPTERS // 2)
        arena.apply([HostCopy(*served.images[next_index])])
        loads.append(next_index)

    rows = sequences(MAX_ROWS, NUM_ADAPTERS // 2)
    beside, _ = step_times(model, rows, keep_loading)
    while loads and not arena.pop_completed_copies():
        pass
    return {
        "alone_p50_ms": statistics.median(alone) * 1e3,
        "alone_max_ms": max(alone) * 1e3,
        "loading_p50_ms": statistics.median(beside) * 1e3,
        "loading_max_ms": max(beside) * 1e3,
        "loads": len(loads),
    }


def floors() -> dict[str, float]:
    """What this device's memory and its bus give, in GB/s: reads and writes of a copy together."""
    from bench.gpu_kernels import time_us

    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    copy_us = time_us(copy, 1).best_us
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    part = target[: len(host)]
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        part.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return {
        "device_copy_gb_per_s": 2 * len(source) / copy_us / 1e3,
        "host_to_device_gb_per_s": len(host) / min(seconds) / 1e9,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=results.FOLDER / "gpu.json")
    parser.add_argument("--small", action="store_true", help="two layers: a quick look")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu: no CUDA device here, nothing was measured", file=sys.stderr)
        return 2
    from bench.gpu_kernels import attention_kernels, lora_kernels

    torch.manual_seed(0)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "floors": floors()}
    found["lora"] = lora_kernels()
    torch.cuda.empty_cache()
    found["attention"] = attention_kernels()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        config = CONFIG | (SMALL if options.small else {})
        Path(folder, "config.json").write_text(json.dumps(config))
        served = Served(load_geometry(Path(folder)))
    found["weights_bytes"] = served.transformer.weights.num_bytes
    found["load"] = load(served)
    found["decode"] = decode(served)
    found["decode_under_loads"] = decode_under_loads(served)
    for name in ("lora", "attention", "decode"):
        columns = list(found[name][0])
        results.show(name, columns, [[row[column] for column in columns] for row in found[name]])
    print(
        json.dumps(
            {name: found[name] for name in ("floors", "load", "decode_under_loads")}, indent=1
        )
    )
    results.write(options.out, "gpu", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
