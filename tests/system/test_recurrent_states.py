"""The states of a model with recurrent layers, as operators see them: real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_svc.engine.transport.messages import Command
from inference_svc.model.architectures import load_description
from inference_svc.model.recurrent_states import num_slots, slot_bytes
from loadout.prometheus import scrape
from loadout.types import RecurrentStates
from tests.support.models.zoo import VOCAB, Zoo
from tests.support.native import native_library
from tests.system.engines import Running
from tests.system.services import Services

PAGE, INTERVAL, MAX_STORED, MAX_SEQUENCES = 16, 32, 3, 2
CAPACITY = 2 * MAX_SEQUENCES + MAX_STORED
FLAGS = (
    *("--max-sequences", str(MAX_SEQUENCES), "--stored-states", str(MAX_STORED)),
    *("--state-interval-tokens", str(INTERVAL), "--page-size", str(PAGE)),
)
PREFIX = "loadout_inference_recurrent_"


@pytest.fixture
def hybrid(zoos: Callable[[str], Zoo], tmp_path: Path) -> Iterator[Services]:
    with Services(zoos("qwen3_5"), tmp_path, inference_flags=FLAGS) as made:
        yield made


def prompt(seed: int) -> list[int]:
    """100 tokens: the last full page ends at 96, where three intervals do."""
    return [(seed * 37 + index * index) % (VOCAB - 3) + 3 for index in range(100)]


def measured(services: Services) -> dict[str, int]:
    found = scrape(services.inference_metrics)
    names = (
        *("states_used", "states_stored", "states_capacity"),
        *("state_evictions_total", "recomputed_tokens_total"),
    )
    return {name: int(found.one(PREFIX + name)) for name in names}


def cached_tokens(services: Services, seed: int) -> int:
    *_, last = services.client.generate(prompt(seed), max_tokens=4, ignore_eos=True)
    assert last.usage is not None
    return last.usage.cached_prompt_tokens


@pytest.mark.processes
def test_states_are_counted(hybrid: Services) -> None:
    """By info, in the memory, and by metrics, which move as states are stored, found and lost."""
    client, state_bytes = hybrid.client, slot_bytes(load_description(hybrid.zoo.model_dir))
    info = client.server_info()
    empty = RecurrentStates(state_bytes, INTERVAL, CAPACITY, MAX_STORED, used=0, stored=0)
    assert info.recurrent_states == empty
    (memory,) = (each for each in info.memory if each.name == "recurrent_states")
    assert (memory.used_bytes, memory.capacity_bytes) == (0, num_slots(CAPACITY) * state_bytes)
    counts = measured(hybrid)
    assert counts.pop("states_capacity") == CAPACITY
    assert not any(counts.values())

    generation = client.generate(prompt(1), max_tokens=100, ignore_eos=True)
    next(generation)
    running = measured(hybrid)
    assert running["states_used"] == 2
    # The prompt's, and more of the answer, which goes on meanwhile.
    assert 3 <= running["states_stored"] <= CAPACITY - running["states_used"]
    list(generation)
    assert cached_tokens(hybrid, 1) == 96
    assert measured(hybrid)["recomputed_tokens_total"] == 0

    assert cached_tokens(hybrid, 2) == 0
    assert cached_tokens(hybrid, 3) == 0
    lost = measured(hybrid)
    assert lost["state_evictions_total"] > 0
    assert lost["states_stored"] <= CAPACITY
    cached = cached_tokens(hybrid, 1)
    again = measured(hybrid)
    assert cached + again["recomputed_tokens_total"] == 96, "its pages are still known"
    assert cached < 96
    assert again["states_used"] == 0


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_the_budget_is_what_is_allocated(start: Callable[..., Running], native: bool) -> None:
    """By both backends, after steps with prompts and decodes."""
    if native:
        native_library()
    running = start("qwen3_5", native_kernels=native, max_sequences=3, num_stored_states=5)
    for number in range(3):
        running.submit(f"{number}", prompt(number), max_tokens=8)
    for number in range(3):
        running.result(f"{number}")
    built = running.engine.built
    describe: Any = built.engine.commands.describe
    budget = describe.budget
    status = running.call(Command.DESCRIBE).result
    planned = budget.bytes_of("recurrent_states")
    assert status.memory["recurrent_states"] == (0, planned)
    assert planned == num_slots(2 * 3 + 5) * slot_bytes(built.decoder)
    assert status.recurrent.capacity == 11
    allocated = status.memory["weights"][1]
    assert allocated == pytest.approx(budget.bytes_of("weights"), rel=0.02)
    assert built.engine.runner.backend.workspace_bytes <= budget.bytes_of("workspace")
