"""Pickled weights: harmless ones become safetensors, all others are a named refusal."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapter_store.checkpoint.open import open_checkpoint
from adapter_store.checkpoint.reading.files import CheckpointLimits
from adapter_store.checkpoint.unpickle import TASK, convert_pickle
from adapter_store.checkpoint.unpickle import task as child
from adapter_store.core import SourceFile
from adapter_store.errors import InvalidAdapter, LimitExceeded
from servicekit.errors import Draining
from servicekit.sandbox.process import Task

pytestmark = pytest.mark.processes

BIN, WEIGHTS = "adapter_model.bin", "adapter_model.safetensors"
LIMITS = CheckpointLimits()


def archive(data_pkl: bytes, extra: dict[str, bytes] | None = None, **options) -> bytes:
    """A file as torch.save writes it, around any pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as made:
        made.writestr("archive/data.pkl", data_pkl)
        made.writestr("archive/byteorder", b"little")
        for name, data in (extra or {}).items():
            made.writestr(name, data)
        made.writestr("archive/version", b"3\n")
    return file.getvalue()


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def as_bin(folder: Path) -> Path:
    torch.save(load_file(folder / WEIGHTS), folder / BIN)
    (folder / WEIGHTS).unlink()
    return folder


@pytest.mark.parametrize(
    "dtype",
    [
        *(pytest.param(each, marks=pytest.mark.long) for each in (torch.float32, torch.bfloat16)),
        torch.float8_e5m2,
    ],
)
def test_its_digest_is_that_of_the_same_weights_in_safetensors(make_adapter, dtype):
    folder = make_adapter(dtype=dtype)
    digest = open_checkpoint(folder).digest
    converted = convert_pickle(as_bin(folder), LIMITS)
    content = (folder / WEIGHTS).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    assert converted == SourceFile(WEIGHTS, len(content), sha256)
    assert convert_pickle(folder, LIMITS) is None
    assert sorted(os.listdir(folder)) == ["adapter_config.json", WEIGHTS]
    assert open_checkpoint(folder).digest == digest
    assert os.listdir(folder.parent) == [folder.name], "left something behind"


def test_parameters_views_and_byte_order(make_adapter):
    folder = make_adapter()
    digest = open_checkpoint(folder).digest
    tensors = {k: torch.nn.Parameter(v) for k, v in reversed(load_file(folder / WEIGHTS).items())}
    first = next(iter(tensors))
    tensors[first] = tensors[first].t().contiguous().t()
    torch.save(tensors, folder / BIN)
    (folder / WEIGHTS).unlink()
    convert_pickle(folder, LIMITS)
    assert open_checkpoint(folder).digest == digest


def refusal(folder: Path, content: bytes, task: Task = TASK) -> InvalidAdapter:
    folder = folder / "staged"
    folder.mkdir()
    (folder / BIN).write_bytes(content)
    with pytest.raises(InvalidAdapter) as caught:
        convert_pickle(folder, LIMITS, task)
    assert caught.value.subject == BIN
    assert os.listdir(folder) == [BIN]
    assert os.listdir(folder.parent) == [folder.name], "left something behind"
    return caught.value


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def test_pickle_with_code_is_refused_unrun(tmp_path):
    (tmp_path / "work").mkdir()
    content = archive(pickle.dumps({"a": Runs(tmp_path / "ran")}, protocol=2))
    error = refusal(tmp_path / "work", content)
    assert error.reason == "PICKLE_REFUSED"
    assert "mkdir" in error.message
    assert not (tmp_path / "ran").exists()


def limited(**limits: float) -> Task:
    return replace(TASK, limits=replace(TASK.limits, **limits))


def endless_hash() -> bytes:
    """{(((), ()), ((), ())): 0}, sixty deep: a hundred bytes whose hash takes for ever."""
    return b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"K\x00s."


def test_a_pickle_that_takes_for_ever_is_ended(tmp_path):
    error = refusal(tmp_path, archive(endless_hash()), limited(cpu_seconds=1))
    assert error.reason == "PICKLE_TIMEOUT"
    assert "CPU" in error.message


def test_a_pickle_that_takes_all_memory_is_ended(tmp_path):
    request = b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R."
    assert pickle.loads(request.replace(b"\x00\x00\x00\x00\x00\x01", b"\x01\0\0\0\0\0")) == b"\0"
    assert refusal(tmp_path, archive(request)).reason == "PICKLE_OUT_OF_MEMORY"


def other_task(tmp_path: Path, text: str) -> Task:
    """A task that does this in place of reading the pickle."""
    program = tmp_path / "task.py"
    lines = [
        "import os, signal, sys, time",
        "def answer(request):",
        "    reason, result, output = '', b'W', request['output']",
        f"    {text}",
        "    return result, reason",
    ]
    program.write_text("\n".join(lines))
    return replace(TASK, program=program)


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "PICKLE_CRASHED", "signal 9"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "PICKLE_CRASHED", "signal 11"),
        ("os._exit(3)", "PICKLE_CRASHED", "exit code 3"),
        ("os._exit(0)", "PICKLE_CRASHED", "no answer"),
        ("reason = 'x' * 100_000", "PICKLE_CRASHED", "too long"),
        ("result, reason = b'R', 'R' * 1000 + '\\n\\0' + 'd' * 1000", "R" * 64, "x00d{299}$"),
        ("pass", "FILE_MISSING", "missing"),
        ("os.mkfifo(output)", "FILE_NOT_REGULAR", WEIGHTS),
        ("os.symlink('/etc/passwd', output)", "FILE_NOT_REGULAR", WEIGHTS),
        ("time.sleep(1000)", "PICKLE_TIMEOUT", "over 0.5 s"),
    ],
)
def test_a_child_that_does_not_end_well(tmp_path, text, reason, detail):
    (tmp_path / "work" / "staged").mkdir(parents=True)
    (tmp_path / "work" / "staged" / BIN).write_bytes(b"x")
    task = other_task(tmp_path, text)
    task = replace(task, limits=replace(task.limits, wall_seconds=0.5 if "sleep" in text else 120))
    with pytest.raises(InvalidAdapter, match=detail) as caught:
        convert_pickle(tmp_path / "work" / "staged", LIMITS, task)
    assert caught.value.reason == reason
    assert os.listdir(tmp_path / "work") == ["staged"]
    assert os.listdir(tmp_path / "work" / "staged") == [BIN]


def test_the_child_may_take_more_for_a_larger_file(tmp_path):
    (tmp_path / "staged").mkdir()
    text = "import resource as r; result, reason = b'R', f'SEEN\\n{r.getrlimit(r.RLIMIT_FSIZE)[0]}'"
    for num_bytes in (1, 1000):
        (tmp_path / "staged" / BIN).write_bytes(b"x" * num_bytes)
        with pytest.raises(InvalidAdapter, match=str((16 << 20) + num_bytes)) as caught:
            convert_pickle(tmp_path / "staged", LIMITS, other_task(tmp_path, text))
        assert caught.value.reason == "SEEN"


def test_the_child_has_nothing_of_ours(tmp_path):
    """Neither a secret, nor a file, nor a module."""
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / BIN).write_bytes(b"x")
    ours = ["contract", "servicekit", "adapter_store", "inference_svc", "loadout"]
    text = f"result, reason = b'R', 'SEEN\\n' + str({{*{ours}}} & {{*sys.modules}})"
    with pytest.raises(InvalidAdapter, match=r"set\(\)") as caught:
        convert_pickle(tmp_path / "staged", LIMITS, other_task(tmp_path, text))
    assert caught.value.reason == "SEEN"


def test_a_stopping_store_ends_the_child(tmp_path):
    (tmp_path / "staged").mkdir()
    (tmp_path / "staged" / BIN).write_bytes(b"x")
    asked = threading.Event()

    def check_cancelled() -> None:
        asked.set()
        raise Draining("stopping")

    task = other_task(tmp_path, "time.sleep(1000)")
    with pytest.raises(Draining):
        convert_pickle(tmp_path / "staged", LIMITS, task, check_cancelled)
    assert asked.is_set()


def test_a_file_over_the_limit_is_not_read(tmp_path):
    (tmp_path / BIN).write_bytes(b"x" * 1000)
    with pytest.raises(LimitExceeded):
        convert_pickle(tmp_path, CheckpointLimits(max_source_bytes=999))


def test_link_is_refused(tmp_path):
    (tmp_path / BIN).symlink_to("/etc/passwd")
    with pytest.raises(InvalidAdapter) as caught:
        convert_pickle(tmp_path, LIMITS)
    assert caught.value.reason == "FILE_NOT_REGULAR"


# The child's own checks, in this process: they need no limits to be seen.


def overlapping() -> bytes:
    """Two entries of the directory point at one place (a bomb without compression)."""
    data = bytearray(archive(b"N.", {"archive/data/0": b"x" * 100, "archive/data/1": b"y" * 100}))
    first, second = data.index(b"PK\x03\x04"), 0
    directory = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", directory + 4)
    third = data.index(b"PK\x01\x02", second + 4)
    offset = data[third + 42 : third + 46]
    fourth = data.index(b"PK\x01\x02", third + 4)
    data[fourth + 42 : fourth + 46] = offset
    assert first == 0
    return bytes(data)


def oversized() -> bytes:
    """An entry that declares a gigabyte in a small file."""
    data = bytearray(archive(b"N.", {"archive/data/0": b"x" * 100}))
    third = data.index(b"PK\x01\x02")
    for _ in range(2):
        third = data.index(b"PK\x01\x02", third + 4)
    data[third + 20 : third + 28] = (1 << 30).to_bytes(4, "little") * 2
    return bytes(data)


def many_entries() -> bytes:
    return archive(b"N.", {f"archive/data/{i}": b"" for i in range(200)})


ARCHIVES = {
    "legacy pickle": (pickle.dumps({}), "PICKLE_NOT_ZIP"),
    "not an archive": (b"hello", "PICKLE_NOT_ZIP"),
    "empty file": (b"", "PICKLE_NOT_ZIP"),
    "compressed bomb": (
        archive(b"N.", {"archive/data/0": bytes(10 << 20)}, compression=zipfile.ZIP_DEFLATED),
        "ZIP_BOMB",
    ),
    "overlapping entries": (overlapping(), "ZIP_BOMB"),
    "oversized entry": (oversized(), "ZIP_BOMB"),
    "too many entries": (many_entries(), "ZIP_TOO_MANY_ENTRIES"),
    "parent folder": (archive(b"N.", {"archive/../../etc/x": b""}), "ZIP_ENTRY_INVALID"),
    "absolute name": (archive(b"N.", {"/etc/x": b""}), "ZIP_ENTRY_INVALID"),
    "large pickle": (archive(bytes((16 << 20) + 1)), "PICKLE_TOO_LARGE"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_lying_archives_are_refused(tmp_path, case):
    content, reason = ARCHIVES[case]
    path = tmp_path / BIN
    path.write_bytes(content)
    with pytest.raises(child.Refused) as caught:
        child.check_archive(str(path), len(content), 100)
    assert caught.value.reason == reason


def test_an_archive_with_two_entries_of_one_name(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        content = archive(b"N.", {"archive/byteorder": b"big"})
    (tmp_path / BIN).write_bytes(content)
    with pytest.raises(child.Refused) as caught:
        child.check_archive(str(tmp_path / BIN), len(content), 100)
    assert caught.value.reason == "ZIP_ENTRY_INVALID"


CONTENTS = {
    "a list": ([torch.ones(2)], "PICKLE_NOT_TENSORS"),
    "a tensor": (torch.ones(2), "PICKLE_NOT_TENSORS"),
    "nested": ({"state_dict": {"a": torch.ones(2)}}, "PICKLE_NOT_TENSORS"),
    "numbers for names": ({1: torch.ones(2)}, "PICKLE_NOT_TENSORS"),
    "a text": ({"a": torch.ones(2), "note": "x"}, "PICKLE_NOT_TENSORS"),
    "integers": ({"a": torch.ones(2, dtype=torch.int64)}, "DTYPE_UNSUPPORTED"),
    "doubles": ({"a": torch.ones(2, dtype=torch.float64)}, "DTYPE_UNSUPPORTED"),
    "complex": ({"a": torch.ones(2, dtype=torch.complex64)}, "DTYPE_UNSUPPORTED"),
    "sparse": ({"a": torch.eye(2).to_sparse()}, "PICKLE_NOT_TENSORS"),
    "stride 0": ({"a": torch.ones(1).expand(1 << 20, 1 << 20)}, "ZIP_BOMB"),
    "one storage for many": (
        dict.fromkeys([f"t{i}" for i in range(100)], torch.ones(10_000)),
        "ZIP_BOMB",
    ),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_contents_that_are_no_weights(tmp_path, case):
    value, reason = CONTENTS[case]
    content = saved(value)
    (tmp_path / BIN).write_bytes(content)
    child.check_archive(str(tmp_path / BIN), len(content), 200)

    def read() -> None:
        child.check_tensors(child.load(str(tmp_path / BIN)), len(content))

    with pytest.raises(child.Refused) as caught:
        read()
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "length", [200, *(pytest.param(each, marks=pytest.mark.long) for each in (10, -1))]
)
def test_a_damaged_file_is_a_named_refusal(make_adapter, tmp_path, length):
    folder = as_bin(make_adapter())
    content = (folder / BIN).read_bytes()[:length]
    (tmp_path / "work").mkdir()
    assert refusal(tmp_path / "work", content).reason in ("PICKLE_NOT_ZIP", "PICKLE_INVALID")
