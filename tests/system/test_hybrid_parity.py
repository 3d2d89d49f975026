"""Models with recurrent layers generate the tokens of transformers and PEFT, in any company and
whatever happens to their states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.models.zoo import AdapterSpec, Zoo, adapted, make_model, modules_of
from tests.support.native import native_library
from tests.system.engines import Running

KV_BYTES = {"qwen3_5": 512 << 10, "lfm2": 256 << 10}
"""Room for the keys and values of 1,024 tokens of each model."""
NUM_TOKENS = 64
LENGTHS = (1, 9, 70, 700)
MAX_LEN = 1024
PAGE = 16


@pytest.fixture(scope="module", params=KV_BYTES)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A model with eight adapters: of all projections, and of each alone in turn."""
    kind, folder = request.param, tmp_path_factory.mktemp("hybrid")
    modules = modules_of(kind)
    model = make_model(kind, folder / "model", max_position_embeddings=MAX_LEN)
    specs = [
        AdapterSpec(f"a{number}", 2 + number, modules if number < 4 else modules[number - 4 :: 4])
        for number in range(8)
    ]
    reference = adapted(model, kind, folder / "adapters", specs)
    dirs: dict[str, Path] = {each.name: folder / "adapters" / each.name for each in specs}
    return Zoo(kind, folder / "model", reference, dirs)


def requests() -> dict[str, tuple[str, list[int]]]:
    """Each adapter and the base model, the latter with every length."""
    asked = [("", length) for length in LENGTHS]
    asked += [(f"a{number}", LENGTHS[number % 4]) for number in range(8)]
    generator = torch.Generator().manual_seed(3)
    return {
        f"{adapter or 'base'} {length}": (
            adapter,
            torch.randint(3, 128, (length,), generator=generator).tolist(),
        )
        for adapter, length in asked
    }


@pytest.mark.parametrize(
    "native",
    [True, pytest.param(False, marks=pytest.mark.long)],
    ids=["native", "torch"],
)
def test_greedy_tokens_in_chunks_and_with_preemption(
    start: Callable[..., Running], zoo: Zoo, native: bool
) -> None:
    """All at once, in chunks of 7, with room for a third of them; others are cancelled."""
    if native:
        native_library()
    running = start(
        zoo,
        native_kernels=native,
        max_model_len=MAX_LEN,
        max_prefill_chunk=7,
        max_batch_tokens=48,
        max_sequences=12,
        page_size=PAGE,
        state_pages=4,
        num_stored_states=24,
        kv_bytes=KV_BYTES[zoo.kind],
    )
    asked = requests()
    with running.together():
        for name, (adapter, prompt) in asked.items():
            running.submit(name, prompt, adapter, max_tokens=NUM_TOKENS)
            running.submit(f"{name} cancelled", prompt[::-1], adapter, max_tokens=NUM_TOKENS)
    scheduler = running.engine.built.engine.scheduler
    # Cancelled earlier, on a busy machine, they would leave room for all others.
    running.until(lambda: "base 70 cancelled" in running.outputs and scheduler.num_preemptions)
    for name in asked:
        running.cancel(f"{name} cancelled")
    for name, (adapter, prompt) in asked.items():
        tokens, last = running.result(name)
        assert last.error is None
        assert tokens == zoo.greedy(adapter, prompt, NUM_TOKENS, guess=tokens), name
    # The longest of one adapter again: its state is found, if it was not evicted meanwhile.
    adapter, prompt = asked["a3 700"]
    for name in ("again", "and again"):
        running.submit(name, prompt, adapter, max_tokens=NUM_TOKENS)
        assert running.result(name)[0] == running.result("a3 700")[0]
    usage = running.result("and again")[1].usage
    assert usage is not None
    assert usage.cached_prompt_tokens == (len(prompt) - 1) // PAGE * PAGE
    running.check_idle()
