"""Times a mixture of experts on the CPU against its floor, with adapters, and against transformers.

    python -m bench.kernels.experts [--steps 40] [--rounds 3] [--out bench/results/experts.json]

The model is bench-moe, with OLMoE's 64 experts, 8 for each token. Decode steps of 1, 4 and 16
requests are timed one by one in this thread; results are medians. A step's floor is the time to
read its data once at the best rate of memory: attention, routers, the head, keys and values, and
the experts that its tokens have chosen. If its products at their peak take longer, they are the
floor. Both rates are measured in every round. A prefill of 1024 tokens is compared with the peak of
dense products of the experts' sizes. Then 16 requests with 16 adapters, on attention and on all
experts, are compared with the base in the same engine, and with transformers on the same prompts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.kernels.gemm_shapes import Products
from bench.kernels.roofline import THREADS, read_rate
from bench.models import Prepared, decoder, prepare, prepare_adapter, prompts
from bench.results import FOLDER, median, show, write
from bench.stepper import NUM_IN, NUM_REQUESTS, Stepper
from inference_svc.adapters.targets import build_layout
from inference_svc.model.description import Decoder, Experts

NAME = "bench-moe"
REQUESTS = (1, 4, 16)
PREFILL_TOKENS = 1024
NUM_ADAPTERS = 16
RANK = 16
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True, slots=True)
class Work:
    """The bytes that a step reads, and its operations."""

    num_bytes: float
    flops: float

    def floor_seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


def experts_of(described: Decoder) -> Experts:
    return described.mixtures[0]


def dense_elements(described: Decoder) -> int:
    """Returns the number of weights of one layer that every token uses."""
    attention, router = described.attentions[0], experts_of(described).router.projection
    found = (attention.qkv, attention.out, router)
    return sum(each.in_features * each.out_features for each in found)


def expert_elements(described: Decoder) -> int:
    """Returns the number of weights of one expert."""
    half = experts_of(described)
    return sum(each.in_features * each.out_features for each in (half.gate_up, half.down))


def decode_work(described: Decoder, num_tokens: int, experts: float, context: float) -> Work:
    """Returns the work of a step whose tokens have chosen `experts` experts over all layers."""
    head = described.vocab_size * described.hidden_size
    weights = described.num_layers * dense_elements(described) + head
    read = weights + experts * expert_elements(described)
    read += num_tokens * context * described.kv_elements_per_token
    chosen = experts_of(described).num_chosen
    each = described.num_layers * chosen * expert_elements(described)
    return Work(2.0 * read, 2.0 * num_tokens * (weights + each))


def prefill_flops(described: Decoder, num_tokens: int) -> float:
    """Returns the operations of a prompt; only the last token passes the whole last layer."""
    attention = described.attentions[-1].qkv
    each = dense_elements(described)
    each += experts_of(described).num_chosen * expert_elements(described)
    whole = num_tokens * (described.num_layers - 1) * each
    last = num_tokens * attention.in_features * attention.out_features + each
    return 2.0 * (whole + last)


def peak_flops(described: Decoder) -> float:
    """Returns the best rate of dense products of the model's sizes, per second."""
    half, attention = experts_of(described), described.attentions[0]
    shapes = [
        (each.out_features, each.in_features)
        for each in (attention.qkv, attention.out, half.gate_up, half.down)
    ]
    products = Products(shapes * 8)
    return max(n * products.flops_per_token / products.best(n, 5).seconds for n in (64, 1024))


def chosen_experts(stepper: Stepper) -> int:
    """Returns the number of experts that the last step's tokens have chosen, over all layers."""
    backend: Any = stepper.built.engine.runner.backend
    found = backend.transformer._experts.routings.values()
    num_tokens = int(backend._step.num_tokens)
    return sum(len(routing.experts[:num_tokens].unique()) for routing in found)


def time_steps(stepper: Stepper, num_steps: int) -> tuple[float, float]:
    """Returns a step's seconds, and the number of experts that it reads."""
    seconds, experts = [], []
    for _ in range(num_steps):
        began_s = time.perf_counter()
        stepper.step()
        seconds.append(time.perf_counter() - began_s)
        experts.append(chosen_experts(stepper))
    return median(seconds), sum(experts) / len(experts)


def with_adapters(prepared: Prepared, kind: str) -> Prepared:
    """Returns the model with adapters on attention, or on all experts."""
    root = prepared.model_dir.parent
    folders = {str(index): root / f"{kind}-{index}" for index in range(NUM_ADAPTERS)}
    options: dict[str, Any] = {}
    if kind == "experts":
        options = {"target_parameters": PARAMETERS, "targets": ()}
    for seed, folder in enumerate(folders.values()):
        prepare_adapter(prepared, folder, seed, **options)
    return Prepared(prepared.name, prepared.model_dir, folders)


def arena_of(described: Decoder) -> int:
    layout = build_layout(described, NAME, torch.bfloat16)
    return NUM_ADAPTERS * layout.largest_image(RANK).num_bytes


def measure_ours(prepared: Prepared, num_steps: int) -> dict[str, Any]:
    """Measures one round of our engine."""
    described = decoder(NAME)
    rates = read_rate(), peak_flops(described)
    found: dict[str, Any] = {"read_bytes_per_second": rates[0], "peak_flops_per_second": rates[1]}
    for num_requests in REQUESTS:
        stepper = Stepper(prepared, 0, num_requests)
        seconds, experts = time_steps(stepper, num_steps)
        work = decode_work(described, num_requests, experts, stepper.context)
        found[f"decode {num_requests}"] = {
            "seconds": seconds,
            "experts": experts / described.num_layers,
            "floor_seconds": work.floor_seconds(*rates),
        }
        stepper.close()
    stepper = Stepper(prepared, 0, 2, max_len=2 * PREFILL_TOKENS)
    seconds = median([stepper.time_prompt(prompt) for prompt in prompts(3, PREFILL_TOKENS)])
    floor_s = prefill_flops(described, PREFILL_TOKENS) / rates[1]
    found["prefill"] = {"seconds": seconds, "floor_seconds": floor_s}
    stepper.close()
    for kind in ("attention", "experts"):
        arena = arena_of(described) if kind == "experts" else 0
        stepper = Stepper(with_adapters(prepared, kind), NUM_ADAPTERS, NUM_REQUESTS, arena)
        seconds, experts = time_steps(stepper, num_steps)
        # In the same memory, because another allocation may be faster or slower.
        stepper.restart(uses_adapters=False)
        base_s, _ = time_steps(stepper, num_steps)
        found[f"16 adapters on {kind}"] = {
            "seconds": seconds,
            "experts": experts / described.num_layers,
            "base_seconds": base_s,
        }
        stepper.close()
    return found


class Transformers:
    """Runs the model in transformers, with its default kernels for experts."""

    def __init__(self, prepared: Prepared) -> None:
        model: Any = transformers.AutoModelForCausalLM
        self._model = model.from_pretrained(prepared.model_dir, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def measure(self, num_steps: int) -> dict[str, float]:
        """Returns the seconds of a decode step of each number of requests, and of a prefill."""
        found = {}
        for num_requests in REQUESTS:
            ids = torch.tensor(prompts(num_requests, NUM_IN))
            out = self._model(ids, use_cache=True)
            seconds = []
            for _ in range(num_steps):
                began_s = time.perf_counter()
                token = out.logits[:, -1:].argmax(-1)
                out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
                seconds.append(time.perf_counter() - began_s)
            found[f"decode {num_requests}"] = median(seconds)
        seconds = []
        for prompt in prompts(3, PREFILL_TOKENS):
            began_s = time.perf_counter()
            self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            seconds.append(time.perf_counter() - began_s)
        found["prefill"] = median(seconds)
        return found


def summarize(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns medians of seconds, and of ratios within a round."""
    summary: dict[str, dict[str, float]] = {}
    for name in (name for name, value in rounds[0].items() if isinstance(value, dict)):
        own = [each[name] for each in rounds]
        row = summary[name] = {"ms": 1e3 * median([each["seconds"] for each in own])}
        for column, values in (
            ("experts", [each.get("experts") for each in own]),
            ("of base", [_ratio(each.get("base_seconds"), each["seconds"]) for each in own]),
            ("of floor", [_ratio(each.get("floor_seconds"), each["seconds"]) for each in own]),
            ("transformers ms", [_ratio(each.get("transformers"), 1e-3) for each in own]),
            (
                "of transformers",
                [_ratio(each.get("transformers"), each["seconds"]) for each in own],
            ),
        ):
            found = [value for value in values if value is not None]
            if found:
                row[column] = median(found)
    return summary


def _ratio(first: float | None, second: float) -> float | None:
    return None if first is None else first / second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=FOLDER / "experts.json")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    prepared = prepare(NAME, 0)
    theirs = Transformers(prepared)
    rounds = []
    for _ in range(options.rounds):
        found = measure_ours(prepared, options.steps)
        for name, seconds in theirs.measure(options.steps).items():
            found[name]["transformers"] = seconds
        rounds.append(found)
    summary = summarize(rounds)
    columns = list(dict.fromkeys(column for row in summary.values() for column in row))
    rows = [[name, *(row.get(column) for column in columns)] for name, row in summary.items()]
    show(f"{NAME}: a step", ["", *columns], rows)
    write(options.out, "experts", {"model": NAME, "summary": summary, "rounds": rounds})


if __name__ == "__main__":
    main()
