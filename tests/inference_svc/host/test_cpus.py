"""A process's processors, from files as systems write them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.host.cpus import (
    WHOLE,
    Processor,
    Share,
    bound_to,
    compute_threads,
    find_processor,
    partition_cpus,
    unbind,
    usable_cores,
    usable_cpus,
)
from tests.support.machine.fake_machines import (
    FakeMachine,
    fake_machines,
    write,
    write_cores,
    write_siblings,
)

HYPERTHREADED = [(0, 4), (1, 5), (2, 6), (3, 7)]
MIXED = [(0,), (1,), (2, 3), (4, 5), (6, 7)]
"""Two small cores, which have no siblings, and three large ones."""


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def test_affinity_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cpus(tmp_path) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    assert usable_cpus(tmp_path) == 1


def test_siblings_are_one_core_within_the_quota(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8, "no topology: each is one"
    write_cores(tmp_path, HYPERTHREADED)
    assert (usable_cores(tmp_path), usable_cpus(tmp_path)) == (4, 8)
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "200000 100000\n")
    assert (usable_cores(tmp_path), usable_cpus(tmp_path)) == (2, 2)


@pytest.mark.parametrize(
    ("affinity", "expected"),
    [
        ({0, 1, 2, 3}, 4),  # one of each core's two
        ({4, 5, 6, 7}, 4),
        ({0, 4}, 1),
        ({0, 4, 5}, 2),
        ({7}, 1),
    ],
)
def test_a_core_counts_if_one_of_its_siblings_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affinity: set[int], expected: int
) -> None:
    write_cores(tmp_path, HYPERTHREADED)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: affinity)
    assert usable_cores(tmp_path) == compute_threads(root=tmp_path) == expected
    assert usable_cpus(tmp_path) == len(affinity)


def test_processors_that_are_offline_are_nobodys_siblings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux lists only processors that are online, and gives a process no others."""
    write_siblings(tmp_path, {0: "0", 1: "1,5", 5: "1,5"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 5})
    assert (usable_cores(tmp_path), usable_cpus(tmp_path)) == (2, 3)


def test_each_core_of_two_kinds_has_a_thread(tmp_path: Path) -> None:
    write_cores(tmp_path, MIXED)
    assert compute_threads(root=tmp_path) == 5
    assert partition_cpus(5, root=tmp_path) == [[0], [1], [2, 3], [4, 5], [6, 7]]


def test_without_an_affinity_each_processor_of_the_machine_is_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert (usable_cores(tmp_path), usable_cpus(tmp_path)) == (6, 6)
    assert find_processor(tmp_path) == Processor("unknown processor", 6, 6)
    assert partition_cpus(2, root=tmp_path) == []


@pytest.mark.parametrize(
    ("wanted", "num_ranks", "expected"),
    [(0, 1, 4), (0, 2, 2), (0, 3, 1), (0, 5, 1), (1, 1, 1), (9, 1, 9), (3, 4, 3)],
)
def test_ranks_have_equal_parts_of_the_cores(
    tmp_path: Path, wanted: int, num_ranks: int, expected: int
) -> None:
    """Unless a number is wanted, of each rank."""
    write_cores(tmp_path, HYPERTHREADED)
    assert compute_threads(wanted, num_ranks, tmp_path) == expected


@given(fake_machines(), st.integers(1, 9))
def test_threads_are_the_cores_within_the_quota(machine: FakeMachine, num_ranks: int) -> None:
    with machine.files() as root:
        expected = machine.within_quota(len(machine.parts))
        assert usable_cores(root) == expected == compute_threads(root=root)
        assert usable_cpus(root) == machine.within_quota(len(machine.affinity))
        of_rank = compute_threads(0, num_ranks, root)
        assert of_rank == 1 or of_rank * num_ranks <= expected
        assert (of_rank + 1) * num_ranks > expected
        found = find_processor(root)
        assert found.num_cores == len(machine.parts)
        assert found.num_processors == len(machine.affinity)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 9B14\n\nprocessor\t: 1\n", "AMD EPYC 9B14"),
        ("processor\t: 0\nBogoMIPS\t: 50.0\n", "unknown processor"),
        ("", "unknown processor"),
    ],
)
def test_the_processor_has_a_name(tmp_path: Path, text: str, name: str) -> None:
    write(tmp_path / "proc/cpuinfo", text)
    write_cores(tmp_path, HYPERTHREADED)
    assert find_processor(tmp_path) == Processor(name, 4, 8)
    assert str(find_processor(tmp_path)) == f"{name}: 4 cores, 8 processors"


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (Processor("A", 1, 1), "A: 1 core, 1 processor"),
        (Processor("A", 1, 2, 1.5), "A: 1 core, 2 processors, quota 1.5"),
        (Processor("A", 2, 2, 2.0), "A: 2 cores, 2 processors"),
    ],
)
def test_a_quota_is_shown_if_it_is_a_limit(processor: Processor, expected: str) -> None:
    assert str(processor) == expected


def test_the_quota_is_exact(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "250000 100000\n")
    assert find_processor(tmp_path).quota == 2.5


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


def test_shares_of_cores_are_of_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, nodes take turns in the numbers of processors. The last share has what is left."""
    write_cores(tmp_path, [[i] for i in range(8)])
    for processor in range(8):
        (tmp_path / f"sys/devices/system/cpu/cpu{processor}/node{processor % 2}").mkdir()
    shares = [partition_cpus(4, Share(index, 2), tmp_path) for index in range(2)]
    assert shares == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]
    thirds = [partition_cpus(2, Share(index, 3), tmp_path) for index in range(3)]
    assert thirds == [[[0], [2]], [[1, 4], [6]], [[3, 7], [5]]]
    assert partition_cpus(1, Share(8, 9), tmp_path) == [], "there are fewer cores than shares"
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: bound.append(set(cpus)))
    with bound_to(Share(1, 2), tmp_path):
        assert bound == [{1, 3, 5, 7}]
    with bound_to(WHOLE, tmp_path), bound_to(Share(0, 9), tmp_path):
        assert bound == [{1, 3, 5, 7}, set(range(8))]


def test_a_thread_that_is_placed_hides_no_processor() -> None:
    """Here it is the calling one, which makes a second engine."""
    before = os.sched_getaffinity(0)
    with ThreadPoolExecutor(1) as threads:
        all_parts = partition_cpus(1)

        def place_and_ask() -> list[list[int]]:
            os.sched_setaffinity(0, {min(before)})
            return partition_cpus(1)

        assert threads.submit(place_and_ask).result() == all_parts == [sorted(before)]


def test_a_thread_that_is_placed_starts_others_everywhere() -> None:
    before = os.sched_getaffinity(0)

    def place_and_unbind() -> set[int]:
        os.sched_setaffinity(0, {min(before)})
        unbind()
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(place_and_unbind).result() == before


def test_threads_have_disjoint_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert partition_cpus(8, root=tmp_path) == [[i] for i in range(8)]
    assert partition_cpus(3, root=tmp_path) == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert partition_cpus(9, root=tmp_path) == [], "two would meet"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 9})
    assert partition_cpus(2, root=tmp_path) == [[5], [9]]


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
    write_siblings(tmp_path, {i: siblings(i) for i in range(8)})
    assert partition_cpus(4, root=tmp_path) == expected


@pytest.mark.parametrize(
    ("cores", "num_threads", "expected"),
    [
        (HYPERTHREADED, 6, [[0], [1], [2, 6], [3, 7], [4], [5]]),
        ([(0, 1), (2, 3), (4, 5), (6, 7)], 5, [[0], [2, 3], [4, 5], [6, 7], [1]]),
        ([(0, 1, 2, 3), (4, 5, 6, 7)], 4, [[0, 2, 3], [4, 6, 7], [1], [5]]),
        (MIXED, 7, [[0], [1], [2], [4], [6, 7], [3], [5]]),
    ],
)
def test_threads_that_exceed_cores_have_siblings(
    tmp_path: Path, cores: list[tuple[int, ...]], num_threads: int, expected: list[list[int]]
) -> None:
    """Each core has a thread before one has two."""
    write_cores(tmp_path, cores)
    assert partition_cpus(num_threads, root=tmp_path) == expected


@pytest.mark.parametrize(
    ("cores", "affinity", "expected"),
    [
        ([(0, 4), (1, 5), (2, 6)], {0, 1, 2, 6}, [[0], [1], [2, 6]]),
        ([(0,), (1,), (2, 3)], {0, 1, 2, 3}, [[0], [1], [2, 3]]),
        (HYPERTHREADED, {4, 1, 6}, [[1], [4], [6]]),
    ],
)
def test_a_thread_has_no_sibling_of_anothers_processor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: list[tuple[int, ...]],
    affinity: set[int],
    expected: list[list[int]],
) -> None:
    """Also if some cores have no sibling that may be used."""
    write_cores(tmp_path, cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: affinity)
    assert partition_cpus(3, root=tmp_path) == expected


@given(fake_machines(), st.integers(1, 24))
def test_parts_are_disjoint_and_even(machine: FakeMachine, num_threads: int) -> None:
    """No two threads share a core as long as there are enough."""
    with machine.files() as root:
        parts = partition_cpus(num_threads, root=root)
    if num_threads > len(machine.affinity):
        assert parts == []
        return
    assert len(parts) == num_threads
    assert sorted(each for part in parts for each in part) == sorted(machine.affinity)
    assert all(parts)
    cores = [sum(not core.isdisjoint(part) for core in machine.parts) for part in parts]
    if num_threads <= len(machine.parts):
        assert sum(cores) == len(machine.parts), "each core is in one part"
        assert max(cores) - min(cores) <= 1
    else:
        assert set(cores) == {1}
