"""A command of a service that says how far it is, and prints more than a pipe holds in between."""

from __future__ import annotations

import sys

print("progress: 1 of 2 modules: q_proj", file=sys.stderr)
if sys.argv[1:] == ["fail"]:
    print(" " * 100_000)
    sys.exit("Traceback (most recent call last):\nloadout: the last line")
print("made" + " " * 100_000)
