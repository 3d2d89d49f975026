"""Counts words that make prose hard to read, by page and by package.

    python -m tools.words [--code] [--commits RANGE]

Per 1,000 words: "what" where a noun has a name, "you" for the reader, and phrases that stand for a
noun ("those of", "that which", "one that"). It also shows the longest sentence, in words. Code
blocks, code in a line, names with underscores and addresses do not count. --code counts docstrings,
comments and texts of several words in Python files, by package; --commits counts the messages of a
range of commits.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.history import ROOT, git
from tools.syntax import walk

PACKAGES = (
    *("loadout", "contract", "servicekit", "adapter_store", "inference_svc", "kernels"),
    *("tools", "bench", "fuzz", "tests", "deploy", "examples", "integrations"),
)
BUILT = ("build", "dist")
FOR_USERS = (
    *("README.md", "docs/index.md", "docs/installation.md", "docs/python.md", "docs/http.md"),
    *("docs/adapters.md", "docs/models.md", "docs/trainers.md", "docs/routing.md"),
    *("docs/agents.md", "docs/engines.md"),
    *("docs/kubernetes.md", "docs/security.md", "docs/supply-chain.md"),
    *("docs/operations/sizing.md", "docs/operations/runbook.md", "docs/operations/backup.md"),
    *("docs/operations/ranks.md", "docs/operations/one-machine.md"),
    *("docs/operations/upgrades.md", "docs/observability/dashboards.md"),
    *("docs/observability/tracing.md", "deploy/README.md", "deploy/gateway/README.md"),
)
"""Pages for the person who uses or operates a system. References (fields, flags, metrics) state
facts and need no "you"."""

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_BLOCK = re.compile(r"^ *(```|~~~).*?^ *\1\s*$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"``.*?``|`[^`\n]*`|\b[A-Za-z0-9]+(?:_[A-Za-z0-9]+)+\b")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ADDRESS = re.compile(r"https?://\S+|<!--.*?-->", re.DOTALL)
_END = re.compile(r"[.!?:;](?=\s|$)|\n\s*\n|\n\s*(?:[-*#>]|[├└]─|\d+\.)\s|\n\s*\S+ {2,}(?=\S)|\|")
"""The end of a sentence; also before a row of a list: a mark, or a name and two spaces."""

_STAND_INS = re.compile(
    r"\b(?:those of|that of|that which|those that|those which|one that|ones that|the one of)\b",
    re.IGNORECASE,
)
_STRING_OR_COMMENT = re.compile(
    r"""(?P<quotes>\"{3}|'{3})(?:\\.|(?!(?P=quotes)).)*(?P=quotes)"""
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)
"""A string of a Python file, or a comment: a `#` within a string begins none."""
_YOU = {"you", "your", "yours", "yourself"}


@dataclass(frozen=True, slots=True)
class Count:
    """The counts of a text; rates are per 1,000 words."""

    words: int
    whats: int
    yous: int
    stand_ins: int
    longest: str
    """The longest sentence."""

    def rate(self, number: int) -> float:
        return 1000 * number / self.words if self.words else 0.0

    @property
    def longest_words(self) -> int:
        return len(_WORD.findall(self.longest))


def count(text: str) -> Count:
    """Counts the words of Markdown or of plain text."""
    prose = prose_of(text)
    words = [each.lower() for each in _WORD.findall(prose)]
    sentences = [each.strip() for each in _END.split(prose)]
    return Count(
        len(words),
        sum(each in {"what", "whatever"} for each in words),
        sum(each in _YOU or each.startswith("you'") for each in words),
        len(_STAND_INS.findall(prose)),
        max(sentences, key=lambda each: len(_WORD.findall(each)), default=""),
    )


def prose_of(markdown: str) -> str:
    """Returns the text that a person reads as sentences; code in a line becomes one word."""
    text = _BLOCK.sub("\n\n", markdown)
    text = _LINK.sub(r"\1", text)
    text = _ADDRESS.sub("address", text)
    return _INLINE.sub("code", text)


def pages() -> Iterator[Path]:
    """Yields the pages of the repository, relative to the root, in order."""
    folders = [each for each in ROOT.iterdir() if each.is_dir() and each.name[0] != "."]
    found = [*ROOT.glob("*.md")]
    for folder in folders:
        if folder.name not in BUILT:
            found += folder.rglob("*.md")
    yield from (file.relative_to(ROOT) for file in sorted(found))


def texts_of(source: str) -> Iterator[str]:
    """Yields the docstrings, comments and texts of at least four words of a Python file."""
    for node in walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [each.value if isinstance(each, ast.Constant) else "x" for each in node.values]
            yield from _long_enough("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _long_enough(node.value)
    for found in _STRING_OR_COMMENT.finditer(source):
        if comment := found["comment"]:
            yield comment.lstrip("# ")


def _long_enough(text: str) -> Iterator[str]:
    if len(_WORD.findall(text)) >= 4 and " " in text.strip():
        yield text


def code_of(package: str) -> str:
    """Returns all texts of a package, a paragraph each."""
    files = sorted((ROOT / package).rglob("*.py"))
    found = (texts_of(file.read_text()) for file in files if "_pb2" not in file.name)
    return "\n\n".join(text for texts in found for text in texts)


def commits(range_: str) -> str:
    """Returns the messages of a range of commits."""
    return git("log", "--no-merges", "--format=%s.%n%n%b", range_)


def show(rows: Iterable[tuple[str, Count]]) -> None:
    """Prints a table of the rates, with the length of the longest sentence."""
    print(f"{'':44} {'words':>7} {'what':>6} {'you':>6} {'stand-ins':>9} {'longest':>7}")
    for name, found in rows:
        rates = [found.rate(each) for each in (found.whats, found.yous, found.stand_ins)]
        print(
            f"{name:44} {found.words:7} {rates[0]:6.1f} {rates[1]:6.1f} {rates[2]:9.1f}"
            f" {found.longest_words:7}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--code", action="store_true", help="count Python files, by package")
    parser.add_argument("--commits", metavar="RANGE", help="count the messages of these commits")
    args = parser.parse_args()
    if args.commits:
        show([(args.commits, count(commits(args.commits)))])
    elif args.code:
        show((package, count(code_of(package))) for package in PACKAGES)
    else:
        texts = {str(page): (ROOT / page).read_text() for page in pages()}
        show((name, count(text)) for name, text in texts.items())
        show([("all pages", count("\n\n".join(texts.values())))])


if __name__ == "__main__":
    main()
