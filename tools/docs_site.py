"""Builds the documentation as a site: `python -m tools.docs_site [--repository URL]`.

Gathers every page of the repository under build/docs/pages, at its own place, with the pictures
that it shows, and runs MkDocs on them. Links between pages work as they are. A link to a file that
is no page leads to the repository's host where its URL is given, and is plain text where not.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "docs"
FOLDERS = ("docs", "deploy", "bench", "examples")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
PICTURES = {".png", ".svg"}


def pages() -> list[Path]:
    """Every page, relative to the repository's root."""
    found = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        found += (ROOT / folder).rglob("*.md")
    return sorted(path.relative_to(ROOT) for path in found if "node_modules" not in path.parts)


def with_links(page: Path, text: str, known: set[Path], repository: str) -> str:
    """Returns `text` with its links to files that are no pages led elsewhere, or taken out.

    Raises ValueError for a link to a file that is not in the repository.
    """

    def replaced(match: re.Match[str]) -> str:
        label, target = match.groups()
        name = target.partition("#")[0]
        if not name or re.match(r"[a-z]+:", name):
            return match.group(0)
        path = Path(os.path.normpath(page.parent / name))
        if path in known or path.suffix in PICTURES:
            return match.group(0)
        if path / "README.md" in known:
            return f"[{label}]({name.rstrip('/')}/README.md)"
        if not (ROOT / path).exists():
            raise ValueError(f"{page}: link to {target}, which does not exist")
        return f"[{label}]({repository.rstrip('/')}/{path})" if repository else label

    return LINK.sub(replaced, text)


def gather(folder: Path, repository: str) -> None:
    """Makes `folder` anew, with every page and picture."""
    shutil.rmtree(folder, ignore_errors=True)
    known = set(pages())
    for page in known:
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / page).read_text()
        (folder / page).write_text(with_links(page, text, known, repository))
    for picture in (ROOT / "docs").rglob("*"):
        if picture.suffix in PICTURES:
            target = folder / picture.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, target)


def build(folder: Path, repository: str = "") -> int:
    """Writes the site under `folder`/site; returns the exit status of MkDocs."""
    gather(folder / "pages", repository)
    config = folder / "mkdocs.yml"
    config.write_text((ROOT / "mkdocs.yml").read_text())  # its paths are relative to its place
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the documentation as a site.")
    parser.add_argument(
        "--repository", default="", help="URL that links to source files are relative to"
    )
    status = build(BUILD, parser.parse_args().repository)
    if status == 0:
        print(f"written to {BUILD / 'site'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
