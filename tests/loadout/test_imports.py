"""What importing this package costs: services import the stubs, scripts the client."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "transformers",
    "boto3",
    "sqlalchemy",
    "adapter_store",
    "inference_svc",
    "kernels",
    "servicekit",
)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("loadout.inference.v1.inference_pb2_grpc", (*HEAVY, "loadout.client", "typer", "rich")),
        (
            "loadout.adapter_store.v1.adapter_store_pb2_grpc",
            (*HEAVY, "loadout.client", "typer", "rich"),
        ),
        ("loadout.client", (*HEAVY, "typer", "rich")),
        ("loadout.aio", (*HEAVY, "typer", "rich")),
        ("loadout.cli.__main__", HEAVY),
    ],
)
def test_import_stays_light(module, unwanted):
    program = f"import sys, {module}; print(*sorted(set(sys.modules) & set({unwanted!r})))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_lazy_names():
    import loadout

    assert loadout.Client.__module__ == "loadout.client"
    assert loadout.AsyncClient.__module__ == "loadout.aio"
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        _ = loadout.Klient
