"""Available memory, from files as systems write them."""

from pathlib import Path

import pytest

from inference_svc.host.memory import available_bytes, resident_bytes

GIB = 1 << 30


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """16 GiB of memory, of which 10 are left."""
    meminfo = f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {10 << 20} kB\n"
    write(tmp_path, proc__meminfo=meminfo)
    return tmp_path


def test_machine_without_control_groups(machine: Path) -> None:
    assert available_bytes(machine) == 10 * GIB


def test_unknown_without_proc(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def v2(root: Path, folder: str, limit: str, used: int, cache: int) -> None:
    group = root / "sys/fs/cgroup" / folder
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_tightest_group_counts(machine: Path) -> None:
    write(machine, proc__self__cgroup="0::/pod/container\n")
    v2(machine, "pod/container", "max", GIB, 0)
    v2(machine, "pod", str(4 * GIB), 2 * GIB, GIB)
    assert available_bytes(machine) == 3 * GIB
    v2(machine, "pod/container", str(2 * GIB), GIB, 0)
    assert available_bytes(machine) == GIB


def test_container_with_its_group_as_root(machine: Path) -> None:
    write(machine, proc__self__cgroup="0::/docker/0123\n")
    v2(machine, "", str(2 * GIB), GIB // 2, 0)
    assert available_bytes(machine) == GIB + GIB // 2


def test_control_groups_v1(machine: Path) -> None:
    write(machine, proc__self__cgroup="9:cpu,cpuacct:/a\n4:memory:/a\n0::/\n")
    group = machine / "sys/fs/cgroup/memory/a"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(str(3 * GIB))
    (group / "memory.usage_in_bytes").write_text(str(2 * GIB))
    (group / "memory.stat").write_text(f"cache 7\ntotal_inactive_file {GIB // 2}\n")
    assert available_bytes(machine) == GIB + GIB // 2
    (group / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert available_bytes(machine) == 10 * GIB


def test_group_over_its_limit(machine: Path) -> None:
    write(machine, proc__self__cgroup="0::/a\n")
    v2(machine, "a", str(GIB), GIB + 5, 0)
    assert available_bytes(machine) == 0


def test_this_process() -> None:
    assert resident_bytes() > 10 << 20
    left = available_bytes()
    assert left is not None
    assert left > 0
