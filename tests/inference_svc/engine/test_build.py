"""What an engine is built with, where its config leaves it open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference_svc.backends import torch as torch_backend
from inference_svc.backends.cuda.factory import CudaFactory
from inference_svc.backends.native import backend as native
from inference_svc.backends.speed_notes import native_notes
from inference_svc.backends.torch import TorchFactory
from inference_svc.core import EngineConfig, Request, SamplingParams, Sequence
from inference_svc.engine import build
from inference_svc.engine.build import BuiltEngine, build_engine, set_num_threads
from inference_svc.host import cpus
from inference_svc.host.cpus import find_processor
from inference_svc.model.architectures import load_description
from inference_svc.model.quantised import read_scheme
from inference_svc.store.client import NoStore
from tests.support.native import native_library


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is its embedding."""
    made = tmp_path_factory.mktemp("model")
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(made)
    return made


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def built(folder: Path, **fields: object) -> BuiltEngine:
    config = EngineConfig(
        folder, "m", max_model_len=64, kv_bytes=1 << 20, arena_bytes=1 << 20, **fields
    )
    made = build_engine(config, NoStore(), lambda event: None)
    made.puller.close()
    return made


@pytest.mark.parametrize(
    ("wanted", "cores", "ranks", "got"),
    [(0, 2, 1, 2), (0, 8, 1, 8), (3, 2, 1, 3), (0, 8, 3, 2), (0, 2, 4, 1), (3, 8, 2, 3)],
)
def test_ranks_share_the_usable_cores_whatever_torch_guesses(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    wanted: int,
    cores: int,
    ranks: int,
    got: int,
) -> None:
    """Torch's own number is 4."""
    monkeypatch.setattr(cpus, "usable_cores", lambda root: cores)
    config = EngineConfig(folder, "m", num_threads=wanted, tensor_parallel=ranks)
    assert set_num_threads(config) == torch.get_num_threads() == got


def test_an_engine_computes_with_the_threads_that_its_log_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpus, "usable_cores", lambda root: 3)
    caplog.set_level("INFO", logger=build.__name__)
    speed = built(folder, native_kernels=False).speed
    assert torch.get_num_threads() == speed.num_threads == 3
    assert speed.processor == find_processor()
    [record] = [each for each in caplog.records if "compute on" in each.message]
    assert record.message == f"3 threads compute on {find_processor()}"
    assert vars(record)["num_threads"] == 3
    assert vars(record)["num_cores"] == find_processor().num_cores


@pytest.mark.slow
def test_large_pulls_have_a_pace_beside_steps_on_all_processors(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While sequences run, and nothing waits for a thread that pulls."""
    monkeypatch.setattr(build, "usable_cpus", lambda: 8)
    assert built(folder, num_threads=6, native_kernels=False).puller._pace is None
    made = built(folder, num_threads=7, native_kernels=False)
    pace = made.puller._pace
    assert pace is not None
    assert not pace.is_needed()
    running = Sequence(Request("r", (1,), SamplingParams()))
    made.engine.scheduler.running.append(running)
    assert pace.is_needed()
    made.residency.loads.queued["sha256:a"] = None
    assert not pace.is_needed()


def test_speed_is_of_the_backend_that_computes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (build, native, torch_backend):
        monkeypatch.setattr(module, "usable_cpus", lambda: 8)
    for module in (native, torch_backend):
        monkeypatch.setattr(module, "usable_cores", lambda: 4)
    speed = built(folder, dtype="float16", num_threads=3).speed
    assert speed.num_threads == 3
    assert speed.notes[0].endswith("do not compute float16: set --dtype bfloat16 or float32")
    assert speed.notes[1].startswith("3 threads compute, and this process may use 4 cores")
    logged = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert logged == list(speed.notes)
    variant = native_library().variant
    speed = built(folder, num_threads=4).speed
    assert speed.notes == (*native_notes("float32", variant, (), ()),)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "is_native", "formats"),
    [
        ("none", True, []),
        ("int4", True, [("int4, groups of 32", "native")]),
        ("int8", False, [("int8, per output", "dequantised")]),
    ],
)
def test_the_code_for_each_format_is_known_and_logged(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    quantize: str,
    is_native: bool,
    formats: list[tuple[str, str]],
) -> None:
    native_library()
    caplog.set_level("INFO", logger=build.__name__)
    speed = built(folder, quantize=quantize, native_kernels=is_native).speed
    assert speed.weight_formats == tuple(formats)
    logged = [each.message for each in caplog.records if "weights in" in each.message]
    assert logged == [f"weights in {form}: {code}" for form, code in formats]


def test_weights_that_are_made_plain_are_known(folder: Path) -> None:
    """The checkpoint has four bits, and memory sixteen: the report says so."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": True, "desc_act": True}
    scheme = read_scheme({"quantization_config": config})
    decoder = replace(load_description(folder), quantisation=scheme)
    speed = build._speed(EngineConfig(folder, "m"), decoder, TorchFactory(), 2)
    name = "gptq, 4 bits, groups of 8, act-order"
    assert speed.weight_formats == ((name, "held in float32"),)


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
def test_a_device_names_its_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, quantize: str
) -> None:
    """It computes with no thread of the CPU, whose facts are known all the same."""
    caplog.set_level("INFO", logger=build.__name__)
    monkeypatch.setattr(CudaFactory, "speed_notes", lambda *args: [])
    decoder = load_description(folder, quantize)
    speed = build._speed(EngineConfig(folder, "m"), decoder, CudaFactory(), 2)
    kernels = {"int4": "triton W4A16", "fp8": "triton W8A16"}[quantize]
    assert [each.kernels for each in speed.weight_formats] == [kernels]
    assert speed.num_threads == 0
    assert speed.processor == find_processor()
    assert "compute on" not in caplog.text
