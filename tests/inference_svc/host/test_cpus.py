"""A process's processors, from files as systems write them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from inference_svc.host.cpus import partition_cpus, usable_cores, usable_cpus


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_affinity_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cpus(tmp_path) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    assert usable_cpus(tmp_path) == 1


def test_siblings_are_one_core_within_the_quota(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8, "no topology: each is one"
    for processor in range(8):
        path = f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        write(tmp_path / path, f"{processor % 4},{processor % 4 + 4}\n")
    assert (usable_cores(tmp_path), usable_cpus(tmp_path)) == (4, 8)
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "200000 100000\n")
    assert (usable_cores(tmp_path), usable_cpus(tmp_path)) == (2, 2)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("1000 100000", 1),
        ("1600000 100000", 8),
        ("nonsense", 8),
        ("", 8),
    ],
)
def test_quota(tmp_path: Path, written: str, expected: int) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/docker/0123\n")
    # A container sees its own group as the root.
    write(tmp_path / "sys/fs/cgroup/cpu.max", f"{written}\n")
    assert usable_cpus(tmp_path) == expected


def test_tightest_group_counts(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/pod/container\n")
    write(tmp_path / "sys/fs/cgroup/pod/cpu.max", "300000 100000\n")
    write(tmp_path / "sys/fs/cgroup/pod/container/cpu.max", "max 100000\n")
    assert usable_cpus(tmp_path) == 3
    write(tmp_path / "sys/fs/cgroup/pod/container/cpu.max", "50000 50000\n")
    assert usable_cpus(tmp_path) == 1


def test_control_groups_v1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "9:cpu,cpuacct:/a\n4:memory:/a\n0::/\n")
    group = tmp_path / "sys/fs/cgroup/cpu/a"
    write(group / "cpu.cfs_period_us", "100000\n")
    write(group / "cpu.cfs_quota_us", "-1\n")
    assert usable_cpus(tmp_path) == 8
    write(group / "cpu.cfs_quota_us", "150000\n")
    assert usable_cpus(tmp_path) == 2


def test_threads_have_disjoint_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert partition_cpus(8, tmp_path) == [[i] for i in range(8)]
    assert partition_cpus(3, tmp_path) == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert partition_cpus(9, tmp_path) == [], "two would meet"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 9})
    assert partition_cpus(2, tmp_path) == [[5], [9]]


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        (lambda i: f"{i // 2 * 2}-{i // 2 * 2 + 1}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (lambda i: f"{i % 4},{i % 4 + 4}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (lambda i: "nonsense", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_siblings_go_to_one_thread(
    tmp_path: Path, siblings: Callable[[int], str], expected: list[list[int]]
) -> None:
    for i in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{i}/topology"
        write(folder / "thread_siblings_list", siblings(i) + "\n")
    assert partition_cpus(4, tmp_path) == expected
