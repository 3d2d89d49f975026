"""`loadout`, whose downloads and the parts of whose systems are forks, as in
`python -m tests.support.forks.cli up ...`.

Started by a process that has `forks.address()` in its environment, under `forks.ADDRESS`.
"""

from __future__ import annotations

import sys

from loadout.cli.__main__ import main
from tests.support import forks

if __name__ == "__main__":
    with forks.forked_system(), forks.forked_downloads():
        sys.exit(main())
