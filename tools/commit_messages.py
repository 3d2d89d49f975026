"""Checks the messages of new commits: `python -m tools.commit_messages`.

A subject has at most 72 characters. A commit that changes more than tests and documents has a body,
which gives the reason and the measurement. Merges, and commits up to FIRST_COMMIT, are left out.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator

from tools.history import git

FIRST_COMMIT = "97b6af59"
MAX_SUBJECT = 72


def faults(message: str, files: Iterable[str]) -> Iterator[str]:
    """Yields the faults of one commit's message; `files` are the paths that it changes."""
    subject, _, body = message.strip().partition("\n")
    if len(subject) > MAX_SUBJECT:
        yield f"the subject has {len(subject)} characters, at most {MAX_SUBJECT} are allowed"
    if not body.strip() and any(map(_needs_reason, files)):
        yield "there is no body; give the reason, and a measurement if behaviour or speed changes"


def _needs_reason(file: str) -> bool:
    return not file.startswith(("tests/", "docs/")) and not file.endswith(".md")


def check() -> list[str]:
    """Returns a line for each fault of a new commit, or none if the history is too short to show
    which commits are new."""
    try:
        git("merge-base", "--is-ancestor", FIRST_COMMIT, "HEAD")
    except subprocess.CalledProcessError:
        print(f"{FIRST_COMMIT} is not in this history, so messages of commits are not checked")
        return []
    form = "%x00%H%x01%B%x01"
    text = git("log", "--no-merges", "--name-only", f"--format={form}", f"{FIRST_COMMIT}..HEAD")
    found = []
    for entry in text.split("\0")[1:]:
        commit, message, files = entry.split("\1")
        found += [
            f"{commit[:12]}: {fault}" for fault in faults(message, filter(None, files.split("\n")))
        ]
    return found


def main() -> int:
    found = check()
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
