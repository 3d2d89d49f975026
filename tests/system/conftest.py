"""Zoos of random models, engines over them, and whole systems of real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference_svc.core import EngineConfig
from inference_svc.engine.transport.messages import LayoutAccepted
from inference_svc.engine.transport.thread import EngineThread
from tests.support import forks
from tests.support.access.certificates import Authority
from tests.support.models.zoo import Zoo, make_zoo
from tests.support.servers.otlp import Receiver
from tests.system import guarded
from tests.system.engines import DEFAULTS, CompilingStore, Running, SavedStore
from tests.system.guarded import Inference
from tests.system.observed import ENVIRONMENT, Observed
from tests.system.picture_readers import Reader
from tests.system.services import Services


@pytest.fixture(scope="session")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Zoo]:
    """Models by kind, each made once."""
    made: dict[str, Zoo] = {}

    def zoo(kind: str) -> Zoo:
        if kind not in made:
            made[kind] = make_zoo(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return zoo


@pytest.fixture(scope="session")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Reader]]:
    """Models that read pictures by name, each made once, with the oracle's answers so far."""
    made: dict[str, Reader] = {}

    def reader(name: str) -> Reader:
        if name not in made:
            made[name] = Reader(name, tmp_path_factory.mktemp("reader"))
        return made[name]

    yield reader
    for each in made.values():
        each.close()


@pytest.fixture
def start(zoos: Callable[[str], Zoo], tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts engines over a zoo, by its kind; all are stopped, and found whole, at the end of the
    test."""
    running: list[Running] = []

    def begin(kind: str | Zoo = "llama", **changes: Any) -> Running:
        zoo = zoos(kind) if isinstance(kind, str) else kind
        store = CompilingStore()
        digests = {name: store.register(folder) for name, folder in zoo.adapter_dirs.items()}
        defaults = EngineConfig(zoo.model_dir, zoo.kind, **DEFAULTS)
        saved = tmp_path / f"store{len(running)}"
        engine = EngineThread(replace(defaults, **changes), store, SavedStore(saved))
        made = Running(engine, store, digests)
        engine.start(made.on_outputs)
        layouts = (engine.layout, *engine.other_layouts)
        accepted, *others = [store.register_layout(each) for each in layouts]
        store.save(saved)
        engine.send(LayoutAccepted(accepted, tuple(others)))
        running.append(made)
        return made

    with forks.forked_ranks():
        yield begin
    for made in running:
        made.store.gate.set()
        made.engine.stop()
        made.engine.built.engine.check_integrity()


@pytest.fixture(scope="session")
def services(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Services]:
    """One store and one inference service, shared by the tests that do not harm them."""
    with Services(zoos("llama"), tmp_path_factory.mktemp("services")) as made:
        yield made
        made.check_exit_codes()


@pytest.fixture(scope="session")
def observed(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Observed]:
    """A system whose spans and logs are read."""
    folder = tmp_path_factory.mktemp("observed")
    with Receiver() as receiver, ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ENVIRONMENT.items():
                patch.setenv(name, value)
            made = stack.enter_context(Observed(zoos("llama"), folder, receiver))
        yield made


@pytest.fixture
def forked_commands() -> Iterator[None]:
    """See `forks.forked_commands`."""
    with forks.forked_commands():
        yield


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def serve_base(zoos: Callable[[str], Zoo]) -> Iterator[Callable[..., Inference]]:
    """Starts inference services of the base model alone, as `serve_base(**settings)`."""
    running: list[Inference] = []

    def begin(**settings: Any) -> Inference:
        running.append(guarded.serve_base(zoos("llama").model_dir, **settings))
        return running[-1]

    yield begin
    for each in running:
        each.stop()
