"""The memory budget: its arithmetic, and that a real process keeps to it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference_svc.backends.base import MemoryNeeds
from inference_svc.backends.cuda.factory import CudaFactory
from inference_svc.backends.native.backend import NativeBackend, NativeFactory
from inference_svc.backends.native.buffers import BatchPages, StepArrays
from inference_svc.backends.torch import TorchFactory
from inference_svc.core import EngineConfig, Nodes
from inference_svc.engine.build import build_engine, describe
from inference_svc.engine.memory_budget import (
    Budget,
    Line,
    human,
    local_needs,
    most_needs,
    plan_budgets,
)
from inference_svc.model.architectures import load_description
from inference_svc.model.checkpoint.parameters import weights_bytes
from inference_svc.model.description import Decoder, Rank
from inference_svc.model.sharding.description import of_rank
from inference_svc.model.sharding.stages import of_stage
from inference_svc.store.client import NoStore
from kernels.attention import KVCache
from kernels.attention.native import NativeAttention
from kernels.attention.native_memory import AttentionScratch, AttentionShape
from tests.support.native import native_library
from tests.support.pictures.models import save_config

pytestmark = pytest.mark.matrix

MIB = 1 << 20
NATIVE, TORCH, CUDA = NativeFactory(), TorchFactory(), CudaFactory()


def budget_of(
    config: EngineConfig,
    description: Decoder,
    backend: NativeFactory | TorchFactory = NATIVE,
) -> Budget:
    (budget,) = plan_budgets(config, local_needs(config, description, backend), None)
    return budget


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A model of 24 MiB of weights."""
    folder = tmp_path_factory.mktemp("model") / "wide"
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return EngineConfig(
        folder,
        "wide",
        max_model_len=1024,
        max_sequences=4,
        max_batch_tokens=512,
        max_prefill_chunk=512,
        kv_bytes=96 * MIB,
        arena_bytes=64 * MIB,
        num_threads=1,
    )


def test_the_arithmetic_is_of_all_ranks(config: EngineConfig) -> None:
    """Each has its part of the weights, and pages and an arena of the size that is set."""
    whole = load_description(config.model_dir)
    alone = budget_of(config, whole, TORCH)
    part = of_rank(whole, Rank(0, 4))
    ranks = budget_of(replace(config, tensor_parallel=4), part, TORCH)
    assert alone.bytes_of("weights") <= ranks.bytes_of("weights") < 1.1 * alone.bytes_of("weights")
    assert ranks.bytes_of("kv_pages") == 4 * 96 * MIB
    assert ranks.bytes_of("arena") == 4 * 64 * MIB
    assert ranks.bytes_of("other_ranks") > 3 * 50 * MIB
    assert not alone.bytes_of("other_ranks")


def test_the_arithmetic_is_of_all_stages(config: EngineConfig) -> None:
    """The stages have the whole model together; of a tied head the last one has the embedding,
    too."""
    whole = load_description(config.model_dir)
    alone = budget_of(config, whole, TORCH)
    staged = replace(config, pipeline_parallel=2)
    for index in range(2):
        budget = budget_of(staged, of_stage(whole, index, 2), TORCH)
        embedding_bytes = 4 * whole.vocab_size * whole.hidden_size * whole.head.is_tied
        assert budget.bytes_of("weights") == alone.bytes_of("weights") + embedding_bytes
        assert budget.bytes_of("kv_pages") == 2 * 96 * MIB


def test_one_rank_has_the_tower(tmp_path: Path) -> None:
    """Its weights, workspace and embeddings count once, whatever the number of ranks and stages,
    and on the machine of rank 0; all have memory for the embeddings of a step."""
    folder = save_config("Qwen3VL", tmp_path / "model")
    config = EngineConfig(
        folder, "wide", num_threads=1, max_prompt_images=4, prompt_image_bytes=64 * MIB
    )
    for factory in (TORCH, NATIVE):
        without = local(factory, replace(config, max_prompt_images=0))
        tower = local(factory, config)
        for count, num_stages in ((2, 1), (1, 2), (2, 2)):
            shape = {"tensor_parallel": count, "pipeline_parallel": num_stages}
            of_ranks = local(factory, replace(config, **shape))
            of_texts = local(factory, replace(config, **shape, max_prompt_images=0))
            added = of_ranks.weights_bytes - of_texts.weights_bytes
            assert added == tower.weights_bytes - without.weights_bytes > 0
            pictures = describe(config, 0).pictures
            assert pictures is not None
            step = config.max_batch_tokens * pictures.row_size * 4
            added = of_ranks.workspace_bytes - of_texts.workspace_bytes
            of_tower = tower.workspace_bytes - without.workspace_bytes
            assert of_tower + count * num_stages * step <= added < 2 * of_tower
    of_two = replace(config, tensor_parallel=2)
    others = CUDA.memory_needs(of_two, describe(of_two, 1))
    most = most_needs(of_two, describe(of_two, 0), CUDA)
    tower_bytes = weights_bytes(pictures.tower, torch.float32)
    assert most.weights_bytes - others.weights_bytes == tower_bytes
    assert most.workspace_bytes - others.workspace_bytes > config.prompt_image_bytes
    texts = replace(of_two, max_prompt_images=0)
    without = CUDA.memory_needs(texts, describe(texts, 1))
    assert others.workspace_bytes - without.workspace_bytes >= step
    second = Nodes(2, 1, "127.0.0.1:1", 1.0, "secret")
    elsewhere = replace(config, tensor_parallel=2, nodes=second)
    assert elsewhere.upload_bytes == 0 < config.upload_bytes


def local(factory: TorchFactory | NativeFactory, config: EngineConfig) -> MemoryNeeds:
    return local_needs(config, describe(config, 0), factory)


def test_memory_that_ranks_share_is_counted(config: EngineConfig) -> None:
    """Ranks of several machines have none."""
    shape = replace(config, tensor_parallel=2, pipeline_parallel=2, num_threads=2)
    stage = of_stage(load_description(config.model_dir), 0, 2)
    decoder = of_rank(stage, Rank(0, 2))
    apart = replace(shape, nodes=Nodes(2, 0, "127.0.0.1:1", 1.0, "secret"))
    found, others = (NATIVE.memory_needs(each, decoder).workspace_bytes for each in (shape, apart))
    meeting = NATIVE.open_meeting(4, 2, 60.0, 2)
    [file] = meeting.files
    assert found - others == os.fstat(file).st_size // 4
    meeting.close()


def test_refusal_shows_the_arithmetic() -> None:
    lines = (Line("weights", 3 << 30, "a smaller model"), Line("kv_pages", 1536 * MIB, "--kv"))
    Budget("host", lines, 4608 * MIB, "memory-limit").check()
    with pytest.raises(ValueError, match=r"too small by 512\.0 MiB") as refused:
        Budget("host", lines, 4096 * MIB, "memory-limit").check()
    assert str(refused.value).splitlines() == [
        "the host memory is too small by 512.0 MiB",
        "  weights           3,221,225,472 bytes     3.0 GiB  a smaller model",
        "  kv_pages          1,610,612,736 bytes     1.5 GiB  --kv",
        "  needed            4,831,838,208 bytes     4.5 GiB",
        "  limit             4,294,967,296 bytes     4.0 GiB  memory-limit",
    ]


def test_unknown_limit_refuses_nothing() -> None:
    Budget("host", (Line("weights", 1 << 60),), None, "").check()


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_units(num_bytes: int, text: str) -> None:
    assert human(num_bytes) == text


def test_every_setting_that_takes_memory_has_a_line(config: EngineConfig) -> None:
    description = load_description(config.model_dir)
    changed = replace(config, host_bytes=8 * MIB, memory_limit_bytes=1 << 30, frontend_bytes=MIB)
    changed = replace(changed, tokenizer_bytes=3 * MIB)
    budget = budget_of(changed, description)
    assert budget.place == "host"
    assert budget.limit_bytes == 1 << 30
    assert budget.bytes_of("kv_pages") == 96 * MIB
    assert budget.bytes_of("arena") == 64 * MIB
    assert budget.bytes_of("host_tier") == 8 * MIB
    assert budget.bytes_of("tokenizer") == 3 * MIB
    assert budget.lines[-1].name == "process", "which the machine's limit counts as there"
    num_parameters = 2 * 2048 * 512 + 2 * (4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512) + 512
    assert budget.bytes_of("weights") == 4 * num_parameters
    wider = replace(changed, max_batch_tokens=1024)
    assert budget_of(wider, description).bytes_of("workspace") > budget.bytes_of("workspace")


def tied(description: Decoder) -> Decoder:
    return replace(description, head=replace(description.head, is_tied=True))


def test_tied_head_is_packed_apart(config: EngineConfig) -> None:
    description = tied(load_description(config.model_dir))
    plain, packed = (
        budget_of(config, description, backend).bytes_of("weights") for backend in (TORCH, NATIVE)
    )
    assert packed - plain == 4 * 2048 * 512


@pytest.mark.parametrize("num_threads", [1, 64])
@pytest.mark.parametrize("max_sequences", [4, 512])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_backend_stays_within_its_lines(
    config: EngineConfig,
    dtype: str,
    max_sequences: int,
    num_threads: int,
    request: pytest.FixtureRequest,
) -> None:
    native_library()
    before = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(before))
    config = replace(
        config,
        dtype=dtype,
        num_threads=num_threads,
        max_sequences=max_sequences,
        max_lora_rank=128,
        kv_bytes=16 * MIB,
        arena_bytes=4 * MIB,
    )
    built = build_engine(config, NoStore(), lambda event: None)
    budget = budget_of(config, built.decoder)
    backend, describe = built.engine.runner.backend, built.engine.commands.describe
    assert isinstance(backend, NativeBackend)
    assert 0 < backend.workspace_bytes <= budget.bytes_of("workspace")
    memory = describe().memory
    assert memory["workspace"] == (backend.workspace_bytes, backend.workspace_bytes)
    weights_bytes, _ = memory["weights"]
    assert weights_bytes <= 1.01 * budget.bytes_of("weights")
    built.puller.close()


@pytest.mark.parametrize(("tokens", "rows", "threads"), [(1, 1, 1), (1024, 64, 1), (64, 8, 64)])
def test_attention_takes_its_line(tokens: int, rows: int, threads: int) -> None:
    cache = KVCache.allocate(
        num_layers=1, num_pages=8, page_size=16, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16
    )
    shape = AttentionShape.of(cache, num_heads=14)
    scratch = AttentionScratch(shape, threads)
    step = StepArrays(tokens, rows, 16, BatchPages(rows, 4))
    windows = [NativeAttention(cache, step.rows, scratch, window) for window in (None, 64, 128)]
    taken = scratch.num_bytes + sum(attention.num_bytes for attention in windows)
    assert taken == shape.num_bytes(tokens, rows, threads, len(windows))


def test_engine_beyond_its_limit_is_not_built(config: EngineConfig) -> None:
    limited = replace(config, memory_limit_bytes=100 * MIB)
    with pytest.raises(ValueError, match=r"the host memory is too small.*\n  weights"):
        build_engine(limited, NoStore(), lambda event: None)


MEASURE = """
import json, sys, time
from pathlib import Path
from inference_svc.core import Request, SamplingParams
from inference_svc.engine.transport.messages import Submit
from inference_svc.engine.build import build_engine
from inference_svc.core import EngineConfig
from inference_svc.host.memory import resident_bytes
from inference_svc.store.client import NoStore
fields = json.loads(sys.argv[1])
config = EngineConfig(**fields | {"model_dir": Path(fields["model_dir"])})
before = resident_bytes()
built = build_engine(config, NoStore(), lambda event: None)
sampling = SamplingParams(max_tokens=2, ignore_eos=True)
for number in range(4):
    request = Request(str(number), tuple(range(3, 131)), sampling, arrival_s=time.monotonic())
    built.engine.step([Submit(request)])
status = built.engine.commands.describe()
print(json.dumps([before, resident_bytes(), status.memory, status.memory_limit_bytes]))
built.puller.close()
"""


@pytest.mark.processes
def test_process_takes_its_budget(config: EngineConfig) -> None:
    fields = {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__}
    given = json.dumps({name: str(v) if isinstance(v, Path) else v for name, v in fields.items()})
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, given], capture_output=True, text=True, check=True
    )
    before, after, memory, limit_bytes = json.loads(done.stdout)
    allocated = {name: capacity for name, (_, capacity) in memory.items()}
    fixed = allocated["weights"] + allocated["kv_pages"] + allocated["arena"]
    growth = after - before
    assert growth >= 0.98 * fixed, "memory that was promised is not there yet"
    # Code that is run for the first time and thread stacks are beside it.
    assert growth <= fixed + allocated["workspace"] + 32 * MIB
    assert abs(allocated["process"] - before) < 32 * MIB, "the rest is what was there before"
    assert limit_bytes > after
