"""What an engine is built with, where its config leaves it open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference_svc.core import EngineConfig, Request, SamplingParams, Sequence
from inference_svc.engine import build
from inference_svc.engine.build import BuiltEngine, build_engine
from inference_svc.store.client import NoStore


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
    config = EngineConfig(folder, "m", max_model_len=64, kv_bytes=1 << 20, **fields)
    made = build_engine(config, NoStore(), lambda event: None)
    made.puller.close()
    return made


@pytest.mark.parametrize(("wanted", "usable", "got"), [(0, 2, 2), (0, 8, 4), (3, 2, 3)])
def test_threads_do_not_exceed_usable_processors(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wanted: int, usable: int, got: int
) -> None:
    monkeypatch.setattr(build, "usable_cpus", lambda: usable)
    built(folder, num_threads=wanted, native_kernels=False)
    assert torch.get_num_threads() == got


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


def test_dtype_without_native_kernels_is_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built(folder, dtype="float16")
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["the native kernels do not compute float16: the torch path serves"]
