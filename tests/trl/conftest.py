"""A store and two inference services with the demo's model, which share no folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from loadout import Client
from loadout.demo.adapters import ADAPTERS, MODEL
from loadout.demo.jobs import BASE_MODEL
from loadout.demo.process import Process
from tests.support.loadout.fleet import Fleet, Replica

collect_ignore_glob = [] if find_spec("trl") else ["test_*.py"]
"""`make test-trl` installs what these tests import."""

READY_S = 180.0
GRACE_S = 45.0


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Nothing but the store's own folder is readable as a source."""
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:

        def start(name: str, command: list[str]) -> dict[str, str]:
            ready = folder / f"{name}.json"
            command = [sys.executable, "-m", *command, "--listen", "127.0.0.1:0"]
            command += ["--metrics-listen", "127.0.0.1:0", "--ready-file", str(ready)]
            process = Process(name, command, folder, ready)
            stack.callback(process.stop, GRACE_S)
            return process.wait_ready(READY_S)

        store = start("store", ["adapter_store", "--data-dir", str(folder / "store")])["grpc"]
        inference = ["inference_svc", "--model", str(MODEL), "--base-model", BASE_MODEL]
        inference += ["--store", store, "--dtype", "float32", "--num-threads", "1"]
        inference += ["--http", "127.0.0.1:0"]
        found = [start(f"inference-{number}", inference) for number in range(2)]
        replicas = [Replica(f"http://{at['http']}", at["grpc"], at["metrics"]) for at in found]
        addresses = [replica.grpc for replica in replicas]
        client = stack.enter_context(Client(inference=addresses, store=store))
        for name in ("upper", "reverse"):
            client.register(name, ADAPTERS / name)
        yield Fleet(replicas, client)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="session")
def model() -> torch.nn.Module:
    """The oracle."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture
def cpu_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets TRL's trainer run without a GPU: it computes attention with a kernel for GPUs, and asks
    torch.cuda how fast the device is."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    def varlen(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        *max_seqlens: int,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        """Attends each segment's queries [tokens, heads, dim] to its keys, of which they are the
        last."""
        assert causal
        assert window_size == (-1, -1)
        parts = []
        ends = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
        for (q0, k0), (q1, k1) in pairwise(ends):
            q, k, v = (each.transpose(0, 1) for each in (query[q0:q1], key[k0:k1], value[k0:k1]))
            mask = torch.ones(q1 - q0, k1 - k0).tril(k1 - k0 - (q1 - q0)).bool()
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(
        packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen)
    )
