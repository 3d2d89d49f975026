"""Builds the documentation as a site: `python -m tools.pages.docs_site [--repository URL]`.

It copies every page of the repository to its own place under build/docs/pages, with its pictures,
and runs MkDocs on them. Links between pages work as they are. A link to another file leads to the
repository's host if you give its URL; otherwise it becomes plain text.

The site loads nothing from other hosts. mermaid, which draws the diagrams in the browser, is
fetched once from npm and becomes part of the site. Without npm, diagrams are shown as text.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "docs"
FOLDERS = ("docs", "deploy", "bench", "examples")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
PICTURES = {".png", ".svg"}
MERMAID_VERSION = "11.6.0"
MERMAID_SHA256 = "3a93016a73dc82ba890d919f9bbb176f3da9d98341650c0b517f2595cc68fef8"
MERMAID = ROOT / ".tools" / f"mermaid-{MERMAID_VERSION}.min.js"
SCRIPT = "javascripts/mermaid.min.js"
"""The script's path in the site."""


def pages() -> list[Path]:
    """Returns every page, relative to the repository's root."""
    found = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        found += (ROOT / folder).rglob("*.md")
    return sorted(path.relative_to(ROOT) for path in found if "node_modules" not in path.parts)


def with_links(page: Path, text: str, known: set[Path], repository: str) -> str:
    """Returns `text` with links to other files than pages led to `repository`, or removed.

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


def find_mermaid() -> Path | None:
    """Returns the script, which npm fetches once, or None without npm or network."""
    if MERMAID.exists():
        return MERMAID
    if shutil.which("npm") is None:
        return None
    with tempfile.TemporaryDirectory() as work:
        command = ["npm", "pack", "--silent", f"mermaid@{MERMAID_VERSION}"]
        try:
            done = subprocess.run(command, cwd=work, check=False, capture_output=True, timeout=120)
        except subprocess.TimeoutExpired:
            return None
        if done.returncode:
            return None
        with tarfile.open(next(Path(work).glob("*.tgz"))) as package:
            member = package.extractfile("package/dist/mermaid.min.js")
            assert member is not None
            script = member.read()
        if hashlib.sha256(script).hexdigest() != MERMAID_SHA256:
            raise ValueError(f"mermaid {MERMAID_VERSION} from npm does not have the known hash")
        MERMAID.parent.mkdir(exist_ok=True)
        (Path(work) / MERMAID.name).write_bytes(script)
        shutil.move(Path(work) / MERMAID.name, MERMAID)
    return MERMAID


def with_diagrams(page: Path, text: str, *, are_drawn: bool) -> str:
    """Returns a page that loads our script for its diagrams, or shows them as text.

    The theme fetches mermaid from another host unless a page has it.
    """
    if "```mermaid\n" not in text:
        return text
    if not are_drawn:
        return text.replace("```mermaid\n", "```text\n")
    is_index = page.stem in {"README", "index"}
    up = "../" * (len(page.parts) - is_index)
    return f'{text}\n<script src="{up}{SCRIPT}"></script>\n'


def gather(folder: Path, repository: str) -> None:
    """Replaces `folder` with every page, picture and script."""
    shutil.rmtree(folder, ignore_errors=True)
    known = set(pages())
    mermaid = find_mermaid()
    if mermaid is None:
        print("npm could not fetch mermaid, so diagrams are shown as text", file=sys.stderr)
    else:
        (folder / SCRIPT).parent.mkdir(parents=True)
        shutil.copy(mermaid, folder / SCRIPT)
    for page in known:
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / page).read_text()
        text = with_links(page, text, known, repository)
        (folder / page).write_text(with_diagrams(page, text, are_drawn=mermaid is not None))
    for picture in (ROOT / "docs").rglob("*"):
        if picture.suffix in PICTURES:
            target = folder / picture.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, target)


def build(folder: Path, repository: str = "") -> int:
    """Writes the site under `folder`/site, and returns MkDocs' exit status."""
    gather(folder / "pages", repository)
    config = folder / "mkdocs.yml"
    config.write_text((ROOT / "mkdocs.yml").read_text())  # its paths are relative to its own folder
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
