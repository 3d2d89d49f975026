"""Servers that are restricted to some targets: they compute nothing else, and refuse by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from inference_svc.adapters.layout import EMBEDDING, HEAD
from inference_svc.app import describe_layout
from inference_svc.backends.native.adapter_ops import ADDED_TOKENS
from inference_svc.config import InferenceSettings
from inference_svc.engine.transport.messages import Command
from inference_svc.errors import AdapterUnusable
from inference_svc.model.description import EMBED_TOKENS, LM_HEAD
from loadout import errors
from loadout.cli.__main__ import main
from servicekit.settings.load import load_settings
from tests.support.models.zoo import Zoo
from tests.system.services import Services

ACCEPTED = ("q_proj", "v_proj")
PROMPT = [5, 60, 9, 33, 71, 12]


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
def test_accepted_adapters_say_what_they_always_did(
    start: Callable, zoos: Callable, is_native: bool
) -> None:
    running = start(native_kernels=is_native, lora_targets=ACCEPTED)
    for index, name in enumerate(("r1", "", "r1")):
        running.submit(str(index), PROMPT, name, max_tokens=24)
    for index, name in enumerate(("r1", "", "r1")):
        tokens, last = running.result(str(index))
        assert last.error is None
        assert tokens == zoos("llama").greedy(name, PROMPT, 24, guess=tokens), name or "base"


def test_layout_is_that_of_every_server_of_the_model(start: Callable) -> None:
    """Images are shared with servers that accept everything."""
    restricted, every = start(lora_targets=ACCEPTED), start()
    assert restricted.engine.layout == every.engine.layout


def test_what_is_refused_is_not_computed(start: Callable) -> None:
    """The program of every group, which steps of many different adapters run, has the operations
    of one group in each layer instead of four, and of neither embedding nor head."""
    sizes = []
    for lora_targets in ((), ACCEPTED):
        transformer = start(
            lora_targets=lora_targets
        ).engine.built.engine.runner.backend.transformer
        groups = transformer.every_group
        if lora_targets:
            assert groups == {"layers.0.qkv", "layers.1.qkv", ADDED_TOKENS}
        else:
            own = {EMBED_TOKENS, LM_HEAD, ADDED_TOKENS}
            own |= {name for name in groups if name.rpartition(".")[2].endswith("norm")}
            assert len(own) == 3 + 2 * 2 + 1, "norms of both layers, and the last"
            assert len(groups - own) == 4 * 2 + len((EMBEDDING, HEAD))
        base, every = (len(transformer.program(each).ops) for each in (frozenset(), groups))
        sizes.append((base, every - base))
    (base, every), (other_base, some) = sizes
    assert base == other_base
    assert every > 4 * some > 0


def test_fused_module_is_its_parts(zoos: Callable[[str], Zoo]) -> None:
    """Its checkpoint has these two, and no q_proj."""
    flags = ["--model", str(zoos("phi3").model_dir), "--lora-targets", "qkv_proj,gate_up_proj"]
    described = json.loads(describe_layout(load_settings(InferenceSettings, flags)))
    parts = ["gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
    assert described["announcement"]["loraTargets"] == parts


@pytest.mark.parametrize("host_bytes", [0, 2 << 20], ids=["arena-only", "host-tier"])
def test_image_of_other_targets_is_refused(start: Callable, host_bytes: int) -> None:
    """Its header says what it changes: a store of an earlier release knows nothing of it."""
    running = start(lora_targets=ACCEPTED, host_bytes=host_bytes)
    error = running.call(Command.LOAD, "r33").error
    assert isinstance(error, AdapterUnusable)
    assert error.message == (
        "adapter acme/r33@3 has targets k_proj, o_proj, gate_proj, which are not among this "
        "server's --lora-targets (q_proj, v_proj)"
    )
    running.submit("r", PROMPT, "r8", max_tokens=2)
    message = running.result("r")[1].error.message
    assert message.startswith("adapter acme/r8@3 has a target down_proj, which is not among")
    assert running.call(Command.LOAD, "r1").error is None
    running.check_idle()


@pytest.fixture(scope="module")
def restricted(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Services]:
    """A store, and an inference service for adapters of q_proj and v_proj."""
    flags = ("--lora-targets", "v_proj,q_proj")
    folder = tmp_path_factory.mktemp("restricted")
    with Services(zoos("llama"), folder, inference_flags=flags) as made:
        yield made
        made.check_exit_codes()


REASON = "target down_proj is not among this server's --lora-targets (q_proj, v_proj)"


def test_registration_says_that_no_server_accepts_it(restricted: Services, capfd) -> None:
    command = ("register", "--store", restricted.store_address, "--require-servable")
    assert main([*command, "down", restricted.source("r8")]) == 1
    out, err = capfd.readouterr()
    assert REASON in out
    assert "no server of its base model can serve it" in err
    assert main([*command, "qv", restricted.source("r1")]) == 0


def test_requests_for_it_are_refused(restricted: Services, zoos: Callable[[str], Zoo]) -> None:
    client = restricted.client
    revision = client.register("refused", restricted.source("r8")).revision
    for refused in (
        lambda: client.complete("x", adapter="refused", min_revision=revision, max_tokens=2),
        lambda: client.load("refused"),
    ):
        with pytest.raises(errors.FailedPrecondition) as caught:
            refused()
        assert "a target down_proj, which is not among this server's" in str(caught.value)
    revision = client.register("accepted", restricted.source("r1")).revision
    done = client.complete(
        PROMPT,
        adapter="accepted",
        min_revision=revision,
        max_tokens=16,
        temperature=0.0,
        ignore_eos=True,
    )
    assert list(done.token_ids) == zoos("llama").greedy("r1", PROMPT, 16)


def test_server_shows_its_restriction(restricted: Services, capfd) -> None:
    assert restricted.client.server_info().limits.lora_targets == ACCEPTED
    places = ("--inference", restricted.inference_address, "--store", restricted.store_address)
    assert main(["info", *places]) == 0
    assert "q_proj, v_proj" in capfd.readouterr().out
