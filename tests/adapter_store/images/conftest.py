"""Stores of this process, and compiling that goes on part by part."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from adapter_store.build import open_store
from adapter_store.config import StoreSettings
from adapter_store.images import builder as builder_module
from tests.support.store.images import Steps


@pytest.fixture
def start(tmp_path, data_dir):
    """start(**settings): a store over tmp_path/data that may read adapters under tmp_path."""

    @asynccontextmanager
    async def start_store(**settings):
        values = {
            "data_dir": data_dir,
            "source_roots": (tmp_path,),
            "compile_workers": 1,
            **settings,
        }
        async with open_store(StoreSettings(**values)) as store:
            yield store

    return start_store


@pytest.fixture
def steps(monkeypatch):
    steps = Steps()
    compile_parts = builder_module.compile_parts

    def stepwise(checkpoint, plan, buffer, **options):
        steps.made.append(checkpoint.digest)
        for part in compile_parts(checkpoint, plan, buffer, **options):
            steps.before_part(part.index)
            yield part

    monkeypatch.setattr(builder_module, "compile_parts", stepwise)
    yield steps
    steps.go()
