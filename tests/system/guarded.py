"""Both services under one policy, over real channels: the store in a thread of this process, and
an inference service with a random model in another."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import torch
from safetensors.torch import load_file, save_file

from inference_svc.app import _facts, _load_tokenizer, resolve_settings
from inference_svc.auto_settings import Machine, to_engine_config
from inference_svc.config import InferenceSettings
from inference_svc.engine.transport.thread import EngineThread
from inference_svc.model.architectures import load_description
from inference_svc.server import InferenceServer
from inference_svc.store.client import ImageClient, NoStore
from inference_svc.store.credentials import read_store_access
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.models.zoo import Zoo
from tests.support.store.client import Bearer
from tests.support.store.served import Served
from tests.support.wait import until

OWN, OTHER = "team-a", "team-b"
ROOT = token_lines("root", ["admin", "caller", "operator"], ["*"])
SERVER = token_lines("server", ["server"], ["*"])
START_SECONDS = 60
_MARK = ("ListAdapters", "OK")


class Inference:
    """A real inference service on a thread's own event loop."""

    def __init__(self, config: InferenceSettings) -> None:
        self._config = config
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._ready.wait(START_SECONDS)
        if self._error is not None:
            self._thread.join()
            raise self._error

    async def _main(self) -> None:
        try:
            await self._serve()
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        description = load_description(self._config.model)
        config = resolve_settings(self._config, Machine(has_cuda=False), description)
        access = read_store_access(config)
        self.server = InferenceServer(config, access)
        images = ImageClient(self.server.replicas, access) if config.store else NoStore()
        try:
            text = _load_tokenizer(config)
            engine = EngineThread(to_engine_config(config), images)
            await self.server.start(engine, text, _facts(config, description))
            self._ready.set()
            await self._stop.wait()
        finally:
            await self.server.close()
            images.close()

    def reload(self) -> None:
        """What SIGHUP does; returns when it is done."""
        reload = self.server.reloader.reload()
        asyncio.run_coroutine_threadsafe(reload, self._loop).result(START_SECONDS)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        assert self._error is None


def serve_base(model_dir: Path, **settings: Any) -> Inference:
    """Starts an inference service of the base model alone, on free ports."""
    return Inference(
        InferenceSettings(
            model=model_dir,
            base_model="llama",
            listen="127.0.0.1:0",
            metrics_listen="127.0.0.1:0",
            num_threads=1,
            kv_memory=1 << 20,
            adapter_memory=1 << 20,
            max_model_len=64,
            **settings,
        )
    )


class House:
    """Two tenants, each with an adapter `kept` of a content of its own, resident or not.

    `tokens` are lines of the policy, beside those of root and of the inference service itself.
    """

    def __init__(
        self, start_store: Callable[..., Served], folder: Path, zoo: Zoo, *tokens: str
    ) -> None:
        self.folder, self.zoo = folder, zoo
        self.policy = write_policy(folder, ROOT, SERVER, *tokens)
        self.audit = folder / "audit.jsonl"
        self.store = start_store(policy_file=self.policy, bookmark_seconds=0.1)
        self.root = self.store.connect(token_of("root"))
        token = folder / "server-token"
        token.write_text(token_of("server"))
        self.inference = Inference(
            InferenceSettings(
                model=zoo.model_dir,
                base_model="llama",
                store=self.store.running.grpc_address,
                store_token_file=token,
                listen="127.0.0.1:0",
                metrics_listen="127.0.0.1:0",
                http="127.0.0.1:0",
                policy_file=self.policy,
                audit_file=self.audit,
                num_threads=1,
                kv_memory=8 << 20,
                adapter_memory=8 << 20,
                max_model_len=256,
                classifiers=True,
            )
        )
        self._channels: list[Any] = []
        self._numbers = itertools.count()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self.inference.stop()

    def connect(self, token: str) -> Any:
        """A stub of the inference service that shows this token, "" none."""
        channel: Any = grpc.insecure_channel(self.inference.server.address)
        self._channels.append(channel)
        if token:
            channel = grpc.intercept_channel(channel, Bearer(token))
        return pb_grpc.InferenceServiceStub(channel)

    def fresh(self, tenant: str = "") -> str:
        """A name that nobody has."""
        return f"{tenant}/n{next(self._numbers)}" if tenant else f"n{next(self._numbers)}"

    def make(self) -> Path:
        """An adapter of a content of its own, as a folder that the store may read."""
        number = next(self._numbers)
        target = self.folder / f"adapter-{number}"
        shutil.copytree(self.zoo.adapter_dirs["r1"], target)
        file = target / "adapter_model.safetensors"
        tensors = load_file(file)
        first = min(tensors)
        tensors[first] = torch.full_like(tensors[first], 0.01 * (number + 1))
        save_file(tensors, file)
        return target

    def register(self, name: str, folder: Path) -> str:
        """The digest."""
        return str(self.root.register(name, folder).adapter.digest)

    def calls_of(self, action: Callable[[], Any]) -> Counter[tuple[str, str]]:
        """The questions that the store answers meanwhile, by method and status. Not pulls: a load
        is over before the store has counted its pull."""
        before = self._settled_calls()
        action()
        return self._settled_calls() - before - Counter({_MARK: 1})

    def _settled_calls(self) -> Counter[tuple[str, str]]:
        """A call is counted just after its answer; once the mark is, all before it are."""
        num_before = self._store_calls()[_MARK]
        self.root.stub.ListAdapters(store_pb.ListAdaptersRequest(page_size=1))
        until(lambda: self._store_calls()[_MARK] != num_before)
        return self._store_calls()

    def _store_calls(self) -> Counter[tuple[str, str]]:
        [family] = self.store.running.store.metrics.requests.collect()
        return Counter(
            {
                (sample.labels["method"], sample.labels["code"]): int(sample.value)
                for sample in family.samples
                if sample.name.endswith("_total") and sample.labels["method"] != "PullAdapter"
            }
        )


def generate(stub: Any, adapter: str = "", **fields: Any) -> list[Any]:
    sampling = pb.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    text = fields.pop("text", "hello")
    return list(
        stub.Generate(
            pb.GenerateRequest(text=text, adapter=adapter, sampling=sampling, **fields), timeout=60
        )
    )
