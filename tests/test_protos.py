"""The contract keeps its rules: ours everywhere, buf's own where node can fetch it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

from loadout.adapter_store.v1 import adapter_store_pb2
from loadout.inference.v1 import inference_pb2

ROOT = Path(__file__).parent.parent
PROTOS = ROOT / "protos"
BUF_VERSION = re.search(r"BUF_VERSION := (\S+)", (ROOT / "Makefile").read_text()).group(1)
FILES = (adapter_store_pb2.DESCRIPTOR, inference_pb2.DESCRIPTOR)

FETCH_TIMEOUT_S = 60.0


def messages(file: FileDescriptor) -> Iterator:
    pending = list(file.message_types_by_name.values())
    while pending:
        message = pending.pop()
        pending.extend(message.nested_types)
        yield message


def test_every_file_is_covered() -> None:
    found = {str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto")}
    assert found == {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.package)
def test_package_is_folder_is_version(file: FileDescriptor) -> None:
    assert str(Path(file.name).parent).replace("/", ".") == file.package
    assert re.fullmatch(r"loadout\.[a-z_]+\.v[1-9][0-9]*", file.package)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.package)
def test_each_rpc_has_a_request_and_a_response_of_its_own(file: FileDescriptor) -> None:
    used: set[str] = set()
    for service in file.services_by_name.values():
        assert service.name.endswith("Service")
        for method in service.methods:
            assert method.input_type.name == f"{method.name}Request"
            assert method.output_type.name == f"{method.name}Response"
            names = {method.input_type.full_name, method.output_type.full_name}
            assert not names & used
            used |= names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.package)
def test_enums_have_a_zero_that_means_nothing(file: FileDescriptor) -> None:
    for enum in file.enum_types_by_name.values():
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper()
        assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.package)
def test_fields_are_snake_case(file: FileDescriptor) -> None:
    for message in messages(file):
        for field in message.fields:
            assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name), field.full_name


@pytest.mark.processes
@pytest.mark.artifacts
def test_buf_lint_is_clean() -> None:
    """buf's STANDARD rules, from its npm package."""
    if shutil.which("npm") is None:
        pytest.skip("node is not present")
    folder = ROOT / ".tools" / f"buf-{BUF_VERSION}"
    buf = folder / "node_modules" / ".bin" / "buf"
    if not buf.exists():
        package = f"@bufbuild/buf@{BUF_VERSION}"
        command = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder)]
        try:
            subprocess.run(
                [*command, package],
                capture_output=True,
                check=True,
                timeout=FETCH_TIMEOUT_S,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"buf cannot be fetched: {error}")
    done = subprocess.run([buf, "lint"], cwd=PROTOS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
