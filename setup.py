"""Compiles the protos and the native kernels before Python packages are collected; the rest is in
pyproject.toml."""

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PROTOS = ROOT / "protos"
LIBRARIES = ROOT / "kernels" / "native" / "lib"


def generate_stubs() -> None:
    """Writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` beside each package of the contract."""
    import grpc_tools
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    files = [str(path) for path in sorted(PROTOS.rglob("*.proto"))]
    if protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *outputs, *files]) != 0:
        raise RuntimeError("protoc failed; see its message above")


def compile_kernels(*, only_best: bool) -> None:
    """Compiles the native kernels of every instruction set, or `only_best` this machine's best.

    A wheel needs them all, because it may run on a machine without a compiler. A checkout compiles
    the others at first use. Without a compiler here there are none, and torch computes.
    """
    sys.path.insert(0, str(ROOT))
    from kernels.native.build import CompileFailed, ensure, installed_variants, runnable_variants

    for variant in runnable_variants()[:1] if only_best else installed_variants():
        try:
            ensure(variant)
        except (CompileFailed, OSError) as error:
            print(f"the native kernels for {variant} do not compile: {error}", file=sys.stderr)


def remove_earlier_build(folder: Path) -> None:
    """Removes what would be in the wheel otherwise: also modules that are gone. What --build-lib
    names elsewhere may hold anything, and stays."""
    if ROOT.resolve() / "build" in folder.resolve().parents:
        shutil.rmtree(folder, ignore_errors=True)


class BuildWithStubs(build_py):
    def run(self) -> None:
        generate_stubs()
        compile_kernels(only_best=self.editable_mode)
        if not self.editable_mode:
            remove_earlier_build(Path(self.build_lib))
        super().run()


class WithLibraries(Distribution):
    """Compiled kernels are of one platform, though no extension modules."""

    def has_ext_modules(self) -> bool:
        return any(LIBRARIES.glob("*.so"))


class PlatformWheel(bdist_wheel):
    """Tagged with the platform if libraries are inside, and with any if not."""

    def finalize_options(self) -> None:
        # Before the tag, which depends on the libraries; an editable installation needs none.
        if "bdist_wheel" in self.distribution.commands:
            compile_kernels(only_best=False)
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform  # they are loaded with ctypes: every Python can


setup(
    distclass=WithLibraries,
    cmdclass={"build_py": BuildWithStubs, "bdist_wheel": PlatformWheel},
)
