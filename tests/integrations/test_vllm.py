"""The resolver over a real store, with vLLM's list of adapters stood in for as vLLM 0.32 keeps it.

`make test-vllm` runs vLLM itself.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loadout_vllm.model_shapes import ModelShapes, read_shapes
from loadout_vllm.resolver import Resolver
from safetensors.torch import load_file
from transformers import LlamaConfig

from contract.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from loadout import AsyncClient, errors, types
from loadout.integrations import adapter_folders
from loadout.integrations.adapter_folders import AdapterFolders
from loadout.integrations.following import follow
from tests.support.store.adapters import (
    BASE_MODEL,
    HIDDEN,
    KV,
    LAYERS,
    MLP,
    VOCAB,
    random_tensors,
    save_adapter,
)
from tests.support.store.served import Served

pytestmark = [pytest.mark.processes]

WAIT_S = 10.0
CONFIG = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=MLP,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
)
"""Of the model that the adapters are for."""
assert CONFIG.head_dim * CONFIG.num_key_value_heads == KV


@dataclass
class Request:
    """vLLM's LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class Models:
    """vLLM's OpenAIServingModels and its engine: resolves a name once, and keeps it for ever."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Request] = {}
        self.lora_resolver_lock: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.lora_id_counter = self
        self.engine_client = self
        self.resolver: Resolver | None = None
        self.loaded: dict[int, float] = {}
        self.count = 0
        self.before_add: Callable[[Request], Awaitable[None]] | None = None

    def inc(self, num: int) -> int:
        self.count += num
        return self.count

    async def add_lora(self, request: Request) -> None:
        """Reads the files as vLLM does: with the config's one rank."""
        if self.before_add is not None:
            await self.before_add(request)
        config = json.loads((Path(request.lora_path) / CONFIG_FILE).read_text())
        tensors = load_file(Path(request.lora_path) / WEIGHTS_FILE)
        a = next(each for name, each in sorted(tensors.items()) if "lora_A" in name)
        assert a.shape[0] == config["r"]
        self.loaded[request.lora_int_id] = float(a[0, 0])

    async def ask(self, name: str) -> Request | None:
        """Resolves a name as vLLM does for a request."""
        if name in self.lora_requests:
            return self.lora_requests[name]
        async with self.lora_resolver_lock[name]:
            if name in self.lora_requests:
                return self.lora_requests[name]
            assert self.resolver is not None
            unique = self.inc(1)
            request = await self.resolver.resolve(name)
            if request is None:
                return None
            request.lora_int_id = unique
            await self.add_lora(request)
            self.lora_requests[name] = request
            return request


class House:
    """A resolver that follows the store."""

    def __init__(self, store: Served, root: Path, max_bytes: int = 1 << 30) -> None:
        self.client = AsyncClient(store=store.running.grpc_address)
        self.folders = AdapterFolders(self.client, root, max_bytes)
        self.models = Models()
        shapes = ModelShapes(LAYERS, read_shapes(CONFIG))
        self.resolver = Resolver(
            self.client, self.folders, self.models, Request, (BASE_MODEL,), 8, shapes
        )
        self.models.resolver = self.resolver
        self.following = asyncio.create_task(follow(self.client, self.resolver.changed))

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.following.cancel()
        await asyncio.gather(self.following, return_exceptions=True)
        await self.folders.close()
        await self.client.close()


def run(store: Served, root: Path, test: Callable[[House], Awaitable[None]]) -> None:
    async def main() -> None:
        house = House(store, root)
        try:
            await test(house)
        finally:
            await house.close()

    asyncio.run(main())


def test_a_new_version_takes_the_names_place_and_a_deletion_removes_it(
    store: Served, tmp_path: Path
) -> None:
    folders = [save_adapter(tmp_path / f"v{seed}", seed=seed) for seed in (1, 2)]
    store.client.register("french", folders[0])

    async def test(house: House) -> None:
        models = house.models
        first = await models.ask("french")
        assert first is not None
        assert first.lora_name == "default/french@1"
        pinned = await models.ask("french@1")
        assert pinned is not None
        await asyncio.to_thread(store.client.register, "french", folders[1])
        await house.until(lambda: models.lora_requests["french"] is not first)
        second = models.lora_requests["french"]
        assert second.lora_name == "default/french@2"
        # Another number and another path: vLLM's prefix keys are of both, and what runs goes on.
        assert second.lora_int_id != first.lora_int_id
        assert second.lora_path != first.lora_path
        assert models.loaded[second.lora_int_id] != models.loaded[first.lora_int_id]
        assert models.lora_requests["french@1"] is pinned
        assert Path(first.lora_path).is_dir()  # vLLM may read it again for what still runs
        await house.client.delete("french")
        await house.until(lambda: not models.lora_requests)
        assert await models.ask("french") is None

    run(store, tmp_path / "cache", test)


def test_a_version_that_comes_while_the_name_is_resolved_is_not_missed(
    store: Served, tmp_path: Path
) -> None:
    folders = [save_adapter(tmp_path / f"v{seed}", seed=seed) for seed in (1, 2)]
    store.client.register("french", folders[0])

    async def test(house: House) -> None:
        models = house.models

        async def move(request: Request) -> None:
            """The name moves after it was resolved, before vLLM has written it down."""
            models.before_add = None
            await asyncio.to_thread(store.client.register, "french", folders[1])
            await asyncio.sleep(0.5)

        models.before_add = move
        await models.ask("french")
        await house.until(lambda: models.lora_requests["french"].lora_name == "default/french@2")

    run(store, tmp_path / "cache", test)


def test_refusals_name_their_reason_and_leave_nothing(store: Served, tmp_path: Path) -> None:
    client = store.client
    client.register("alora", save_adapter(tmp_path / "alora", alora_invocation_tokens=[3]))
    client.register("high", save_adapter(tmp_path / "high", rank=16))
    client.register("other", save_adapter(tmp_path / "other"), base_model="org/other")
    first = random_tensors({"model.layers.0.self_attn.q_proj": 4})
    deep = {
        name.replace("layers.0", f"layers.{LAYERS}"): each.clone() for name, each in first.items()
    }
    client.register("deep", save_adapter(tmp_path / "deep", tensors=first | deep))
    narrow = {
        name: (each[:, 1:] if "lora_A" in name else each).contiguous()
        for name, each in first.items()
    }
    client.register("narrow", save_adapter(tmp_path / "narrow", tensors=narrow))

    async def test(house: House) -> None:
        for name, reason in (
            ("alora", "aLoRA"),
            ("high", "--max-lora-rank"),
            ("other", "org/other"),
            ("narrow", f"has {HIDDEN - 1} inputs .*q_proj; .* has {HIDDEN} and {HIDDEN}"),
            ("deep", f"changes layer {LAYERS}; .* layers 0 to {LAYERS - 1}"),
        ):
            with pytest.raises(errors.FailedPrecondition, match=reason):
                await house.models.ask(name)
        for name in ("nothing", "no name", "../../etc", "a/b/c", "sha256:0"):
            assert await house.models.ask(name) is None
        assert house.resolver.num_names == 0

    run(store, tmp_path / "cache", test)


def test_modules_that_only_other_layers_have_are_refused(tmp_path: Path) -> None:
    """Layers may differ. A model that cannot be made here is checked for its layers alone."""
    q = random_tensors({"model.layers.1.self_attn.q_proj": 4})
    experts = {
        name.replace("self_attn.q_proj", "mlp.experts.3.up_proj"): each.clone()
        for name, each in q.items()
    }
    folder = save_adapter(tmp_path / "a", tensors=q | experts)
    full = read_shapes(CONFIG)
    ModelShapes(LAYERS, full).check("a", folder)  # of names that no layer has vLLM decides
    hybrid = {place: shapes for place, shapes in full.items() if place != (1, "self_attn.q_proj")}
    with pytest.raises(errors.FailedPrecondition, match=r"a changes model\.layers\.1\.self_attn"):
        ModelShapes(LAYERS, hybrid).check("a", folder)

    wrong = LlamaConfig(architectures=["LlamaForCausalLM"], hidden_size=0)
    for config in (LlamaConfig(architectures=["NoModel"]), LlamaConfig(), wrong):
        assert read_shapes(config) == {}
    ModelShapes(2, {}).check("a", folder)
    with pytest.raises(errors.FailedPrecondition, match="layers 0 to 0"):
        ModelShapes(1, {}).check("a", folder)


def test_files_that_are_no_plain_lora_are_refused(tmp_path: Path) -> None:
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    a, b = torch.zeros(4, HIDDEN), torch.zeros(HIDDEN, 4)
    refused = {
        "a has 1 dimensions for .*magnitude": {
            f"{q}A.weight": a,
            f"{q}B.weight": b,
            f"{q}magnitude_vector": torch.zeros(HIDDEN),
        },
        r"a has 4 dimensions for .*lora_B": {
            f"{q}A.weight": a,
            f"{q}B.weight": torch.zeros(HIDDEN, 4, 1, 1),
        },
        "a has .*lora_A.weight, but not .*lora_B.weight": {f"{q}A.weight": a},
        "a changes no module": {"base_model.model.model.norm.weight": torch.zeros(1, HIDDEN)},
    }
    for index, (reason, tensors) in enumerate(refused.items()):
        folder = save_adapter(tmp_path / str(index), tensors=tensors)
        for shapes in (read_shapes(CONFIG), {}):
            with pytest.raises(errors.FailedPrecondition, match=reason):
                ModelShapes(LAYERS, shapes).check("a", folder)


def test_the_log_counts_modules_that_are_not_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' class may have other names than vLLM's."""
    folder = save_adapter(tmp_path / "a", modules=("q_proj", "v_proj"))
    known = read_shapes(CONFIG)
    ModelShapes(LAYERS, known).check("a", folder)
    assert "are not checked" not in caplog.text
    fewer = {place: each for place, each in known.items() if not place[1].endswith("q_proj")}
    ModelShapes(LAYERS, fewer).check("a", folder)
    assert f"a: the shapes of {LAYERS} of {2 * LAYERS} modules are not checked" in caplog.text


def test_a_new_version_that_cannot_be_applied_ends_the_old_one(
    store: Served, tmp_path: Path
) -> None:
    """Nobody is served a version that is not current, as if it were."""
    store.client.register("french", save_adapter(tmp_path / "v1"))

    async def test(house: House) -> None:
        await house.models.ask("french")
        alora = save_adapter(tmp_path / "v2", alora_invocation_tokens=[3])
        await asyncio.to_thread(store.client.register, "french", alora)
        await house.until(lambda: not house.models.lora_requests)
        with pytest.raises(errors.FailedPrecondition, match="aLoRA"):
            await house.models.ask("french")

    run(store, tmp_path / "cache", test)


def test_the_last_version_serves_while_the_store_is_away(store: Served, tmp_path: Path) -> None:
    store.client.register("french", save_adapter(tmp_path / "v1"))

    async def test(house: House) -> None:
        first = await house.models.ask("french")
        await asyncio.to_thread(store.stop)
        with pytest.raises(errors.LoadoutError):
            await asyncio.wait_for(house.resolver.changed(None), WAIT_S * 6)
        assert await house.models.ask("french") is first

    run(store, tmp_path / "cache", test)


def test_folders_are_bounded_and_what_is_in_use_stays(
    store: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [
        store.client.register(
            f"a{seed}", save_adapter(tmp_path / f"v{seed}", seed=seed)
        ).adapter.digest
        for seed in range(3)
    ]

    async def main() -> None:
        async with AsyncClient(store=store.running.grpc_address) as client:
            folders = AdapterFolders(client, tmp_path / "cache", 1 << 30)
            first, again = await asyncio.gather(*(folders.take(digests[0]) for _ in range(2)))
            assert first == again
            num_bytes = folders.used_bytes
            await folders.close()

            folders = AdapterFolders(client, tmp_path / "cache", 2 * num_bytes)
            assert not first.exists()  # of the process before
            with pytest.raises(errors.FailedPrecondition, match="another process"):
                AdapterFolders(client, tmp_path / "cache", 1)
            paths = [await folders.take(digest) for digest in digests[:2]]
            with pytest.raises(errors.ResourceExhausted, match="LOADOUT_CACHE_BYTES"):
                await folders.take(digests[2])
            assert all(path.is_dir() for path in paths)
            folders.release(digests[0])
            with pytest.raises(errors.ResourceExhausted):  # what ran with it may still run
                await folders.take(digests[2])
            monkeypatch.setattr(adapter_folders, "GRACE_SECONDS", 0.0)
            third = await folders.take(digests[2])
            assert [path.is_dir() for path in (*paths, third)] == [False, True, True]
            assert folders.used_bytes <= 2 * num_bytes
            await folders.close()

    asyncio.run(main())
    left = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert left == sorted([*(each.removeprefix("sha256:") for each in digests[1:]), "lock"])


def test_exports_at_once_take_their_bytes_before_they_arrive(store: Served, tmp_path: Path) -> None:
    """Else each of them could fill the disk."""
    digests = [
        store.client.register(
            f"a{seed}", save_adapter(tmp_path / f"v{seed}", seed=seed)
        ).adapter.digest
        for seed in range(4)
    ]

    files: list[Path] = []

    class Client(AsyncClient):
        """Notes files that are there when their bytes are taken."""

        async def export(
            self, ref: str, folder: Any, *, admit: Any = None, timeout_s: float | None = None
        ) -> types.Adapter:
            def note(num_bytes: int) -> None:
                files.extend(folder.parent.glob(f".{folder.name}.*/*"))
                admit(num_bytes)

            return await super().export(ref, folder, admit=note, timeout_s=timeout_s)

    async def main() -> None:
        async with Client(store=store.running.grpc_address) as client:
            folders = AdapterFolders(client, tmp_path / "cache", 1 << 30)
            await folders.take(digests[0])
            num_bytes = folders.used_bytes
            await folders.close()

            limit = num_bytes * 5 // 2
            folders = AdapterFolders(client, tmp_path / "cache", limit)
            found = await asyncio.gather(*map(folders.take, digests), return_exceptions=True)
            refused = [each for each in found if isinstance(each, errors.ResourceExhausted)]
            assert len(refused) == 2
            assert files == []
            assert folders.used_bytes == 2 * num_bytes
            on_disk = [each for each in (tmp_path / "cache").iterdir() if each.name != "lock"]
            assert len(on_disk) == 2
            await folders.close()

    asyncio.run(main())
