"""Every kind of adapter over base models in few bits: the logits and greedy tokens of transformers
and PEFT with the weights that the bits mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.pairs import PATHS
from tests.system.kinds import UNSHARED, Kinds, compare, make_kinds

FORMS = ["nf4", *(pytest.param(each, marks=pytest.mark.long) for each in ("awq", "fp8 tensor"))]


@pytest.fixture(scope="module", params=FORMS)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds("qwen3", tmp_path_factory.mktemp("kinds"), form=request.param)


@pytest.mark.parametrize("path", PATHS)
def test_all_kinds_together(zoo: Kinds, path: str, start: Callable) -> None:
    compare(zoo, start, native_kernels=PATHS[path])


@pytest.mark.long
def test_ranks(zoo: Kinds, start: Callable) -> None:
    names = [name for name in zoo.names if name not in UNSHARED]
    compare(zoo, start, names, tensor_parallel=2)
