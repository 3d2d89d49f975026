"""Tokens of ranks are equal to one rank's, whatever the scheduler does."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from tests.support.inference.ranks import NUM_TOKENS, Answers, answers_of_ranks
from tests.support.pairs import PATHS

LONG = pytest.mark.long
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked_ranks")]


@pytest.mark.parametrize(
    ("name", "count", "expert_parallel"),
    [
        ("qwen3_5", 2, 1),
        ("olmo2", 2, 1),
        ("qwen3-moe", 2, 2),
        pytest.param("lfm2", 2, 1, marks=LONG),
        pytest.param("qwen3_5", 4, 1, marks=LONG),
        pytest.param("qwen3-next", 2, 1, marks=LONG),
        pytest.param("lfm2", 4, 1, marks=LONG),
        pytest.param("olmo3", 4, 1, marks=LONG),
        pytest.param("olmoe", 2, 1, marks=LONG),
        pytest.param("gpt-oss", 4, 4, marks=LONG),
        pytest.param("qwen3_5-moe", 4, 2, marks=LONG),
    ],
)
@pytest.mark.parametrize("path", ["native", pytest.param("torch", marks=LONG)])
def test_tokens(
    name: str, count: int, expert_parallel: int, path: str, folder_of: Callable[[str], Path]
) -> None:
    """In a batch, in chunks, from the cache, after preemptions, and of steps in parts."""
    compare(folder_of(name), count, path, expert_parallel=expert_parallel)


@pytest.mark.parametrize(
    ("name", "count", "num_stages"),
    [
        ("qwen3_5", 1, 2),
        ("qwen3-moe", 2, 2),
        pytest.param("qwen3-moe", 1, 3, marks=LONG),
        pytest.param("qwen3_5", 2, 2, marks=LONG),
        pytest.param("qwen3_5", 1, 4, marks=LONG),
        pytest.param("qwen2-tied", 1, 3, marks=LONG),
        pytest.param("lfm2", 2, 2, marks=LONG),
        pytest.param("gemma2", 2, 2, marks=LONG),
        pytest.param("gpt-oss", 2, 3, marks=LONG),
    ],
)
@pytest.mark.parametrize("path", ["native", pytest.param("torch", marks=LONG)])
def test_tokens_of_stages(
    name: str, count: int, num_stages: int, path: str, folder_of: Callable[[str], Path]
) -> None:
    compare(folder_of(name), count, path, pipeline_parallel=num_stages)


def compare(folder: Path, count: int, path: str, **changes: int) -> None:
    native_kernels = PATHS[path]
    expected = answers_of_one(folder, native_kernels)
    assert max(len(each) for each in expected.tokens) == NUM_TOKENS
    assert expected.num_cached > 0
    assert expected.num_preemptions > 0
    assert answers_of_ranks(folder, count, native_kernels=native_kernels, **changes) == expected


@lru_cache(maxsize=4)
def answers_of_one(folder: Path, native_kernels: bool) -> Answers:
    return answers_of_ranks(folder, 1, native_kernels=native_kernels)
