"""`python -m tools.containers` makes everything that `make test-containers` needs."""

from __future__ import annotations

import sys

from tools.containers import bases, engine, images


def main() -> int:
    try:
        engine.install_packages()
        engine.write_configuration()
        for base in (bases.PROMETHEUS, bases.POSTGRES):
            bases.digest(base)
        images.build_previous()
        images.build("cpu", images.CPU_IMAGE)
        images.build("cuda", images.CUDA_IMAGE)
    except engine.ContainersFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
