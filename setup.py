"""Compiles the protos before Python packages are collected; the rest is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PROTOS = ROOT / "protos"


def generate_stubs() -> None:
    """Writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` beside each package of the contract."""
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    files = [str(path) for path in sorted(PROTOS.rglob("*.proto"))]
    if protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *outputs, *files]) != 0:
        raise RuntimeError("protoc failed; see its message above")


class BuildWithStubs(build_py):
    def run(self) -> None:
        generate_stubs()
        super().run()


setup(cmdclass={"build_py": BuildWithStubs})
