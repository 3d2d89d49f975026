"""Runs commands on adapter folders that hang, flood or mislead who trusts them: the program of a
process that is limited.

`python -m tests.system.hostile_folders WORK` prints a line of JSON for each run; WORK is an empty
folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from adapter_store.__main__ import main as store
from contract import folders
from loadout.cli.__main__ import main as loadout
from loadout.signing import SigningKey

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TEMPLATE = "chat_template.jinja"
SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
RUN_SECONDS = 10
MEMORY_BYTES, FILE_BYTES = 12 << 30, 64 << 20
MAX_ENTRIES = 40
ODD_NAME = "adapter_model\x1b[2J\udcff.safetensors"
TRUNCATED = "header of more than is there"
ODD, MANY = "a name that spoils a terminal", "very many entries"


class Hung(BaseException):
    """Raised in a run that takes too long."""


def save(folder: Path) -> Path:
    """Writes an adapter that every command accepts or refuses by its content."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / CONFIG).write_text(json.dumps(config))
    q_proj = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {"lora_A": np.ones((4, 16), np.float32), "lora_B": np.ones((16, 4), np.float32)}
    save_file({f"{q_proj}.{each}.weight": tensors[each] for each in tensors}, folder / WEIGHTS)
    (folder / TEMPLATE).write_text("{{ messages }}")
    return folder


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # its path has to be short


def write(start: bytes, size: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(start)
        os.truncate(path, size)

    return make


def header(num_bytes: int) -> bytes:
    """The start of a .safetensors file that claims one tensor of so many bytes."""
    tensor = {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}
    text = json.dumps({"a": tensor}).encode()
    return len(text).to_bytes(8, "little") + text


def link_as_cached(path: Path) -> None:
    """A link as a hub's cache has, in a folder that is in none."""
    blob = path.parent.parent.parent / "blobs" / ("a" * 64)
    blob.parent.mkdir(exist_ok=True)
    blob.write_text(SECRET)
    path.symlink_to(f"../../blobs/{blob.name}")


# In the place of any file
THINGS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "folder": Path.mkdir,
    "link to a secret": link_to("../../secret"),
    "link to a device": link_to("/dev/zero"),
    "link to a pipe": link_to("../../pipe"),
    "link to nothing": link_to("nothing"),
    "link as a hub's cache has": link_as_cached,
    "sparse file": write(b"", 1 << 40),
}
# In the place of the weights
OF_WEIGHTS: dict[str, Callable[[Path], None]] = {
    "sparse tensor": write(header(1 << 40), (1 << 40) + len(header(1 << 40))),
    TRUNCATED: write(header(1 << 20), 1 << 12),
    "header of too many bytes": write(b"\xff" * 8, 1 << 12),
    "few bytes": write(b"\1", 4),
}


def folders_of(work: Path) -> Iterator[tuple[str, str, Path]]:
    """Yields a thing, the name of the file in whose place it is, and the folder."""
    (work / "secret").write_text(SECRET)
    os.mkfifo(work / "pipe")
    cases = [(thing, name) for thing in THINGS for name in (CONFIG, WEIGHTS, TEMPLATE)]
    cases += [(thing, WEIGHTS) for thing in OF_WEIGHTS]
    for number, (thing, name) in enumerate(cases):
        folder = save(work / "hostile" / str(number))
        (folder / name).unlink(missing_ok=True)
        ({**THINGS, **OF_WEIGHTS}[thing])(folder / name)
        yield thing, name, folder
    folder = save(work / "hostile" / "odd")
    shutil.copy(folder / WEIGHTS, folder / ODD_NAME)
    yield ODD, "adapter_model\\x1b[2J\\udcff.safetensors", folder
    folder = save(work / "hostile" / "many")
    for number in range(MAX_ENTRIES):
        (folder / f"{number}.txt").touch()
    yield MANY, "many", folder


def commands_of(work: Path) -> dict[str, Callable[[Path, Path], Any]]:
    """Returns what runs each command on a folder, given a path for what it makes."""
    good, key = save(work / "good"), work / "key.pem"
    SigningKey.create(key)
    nobody = ("--store", "127.0.0.1:1")
    shared = {
        "check": ("check", "IN"),
        "digest": ("digest", "IN"),
        "strip": ("strip", "IN", "OUT"),
        "convert": ("convert", "IN", "OUT"),
        "convert --initial": ("convert", good, "OUT", "--initial", "IN"),
    }
    of_client = shared | {
        "register": ("register", "a", "IN", *nobody),
        "register --sign-key": ("register", "a", "IN", "--sign-key", key, *nobody),
        "sign": ("sign", "IN", "--key", key),
    }
    found = {f"loadout {name}": caller(loadout, words) for name, words in of_client.items()}
    return found | {f"store {name}": caller(store, words) for name, words in shared.items()}


def caller(
    main: Callable[[list[str]], int], words: tuple[str | Path, ...]
) -> Callable[[Path, Path], int]:
    """Returns what calls a program with a folder in the place of IN, and a path in that of OUT."""

    def call(folder: Path, out: Path) -> int:
        places = {"IN": folder, "OUT": out}
        return main([str(places.get(str(word), word)) for word in words])

    return call


def is_run(command: str, thing: str) -> bool:
    """Returns whether a command is run on a thing: what is in a header, the store's find out."""
    return thing != TRUNCATED or command.startswith("store")


def run(call: Callable[[Path, Path], Any], folder: Path, out: Path) -> dict[str, Any]:
    """Returns what a command has printed, and what it has left."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        signal.setitimer(signal.ITIMER_REAL, RUN_SECONDS)
        try:
            code = call(folder, out)
        except (Hung, Exception) as error:
            code = repr(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    left = sorted(str(path.relative_to(out.parent)) for path in out.parent.rglob("*"))
    return {"code": code, "out": printed.getvalue(), "err": said.getvalue(), "left": left}


def hang(*_: object) -> None:
    raise Hung


def main() -> None:
    work = Path(sys.argv[1])
    os.chdir(work)
    cases = list(folders_of(work))
    commands = commands_of(work)
    folders.MAX_ENTRIES = MAX_ENTRIES
    signal.signal(signal.SIGALRM, hang)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for (command, call), (number, (thing, name, folder)) in product(
        commands.items(), enumerate(cases)
    ):
        if is_run(command, thing):
            out = work / "made" / f"{command}-{number}" / "out"
            out.parent.mkdir(parents=True)
            result = {"command": command, "thing": thing, "name": name}
            print(json.dumps(result | run(call, folder, out)), flush=True)


if __name__ == "__main__":
    main()
