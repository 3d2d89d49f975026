"""Writes the tables of docs/adapters.md: trainers, forms of experts, support for each content,
other files in an adapter's folder, and keys of its config without effect.

python -m tools.pages.adapter_docs
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from adapter_store.checkpoint.features import WORDS, Feature
from adapter_store.checkpoint.formats.readers import EXPERT_FORMS, TRAINERS
from adapter_store.checkpoint.peft.fields import FOREIGN
from contract import side_files
from loadout.cli.adapters.engines import ENGINES, NOTES, Engine
from tools.conformance import WRITERS, verdicts

PATH = Path(__file__).parents[2] / "docs" / "adapters.md"


def render() -> dict[str, str]:
    """Returns the tables by name."""
    files = {**_verdict("refused", side_files.REFUSED)}
    suffixes = ", ".join(f"`.{suffix}`" for suffix in side_files.WEIGHT_SUFFIXES)
    passing = {
        "pass": side_files.HARMLESS,
        "pass next to `adapters.safetensors`": side_files.MLX_HARMLESS,
        f"pass next to `{side_files.TORCHTUNE_FILE}`": side_files.TORCHTUNE_HARMLESS,
    }
    rows = [
        [", ".join(f"`{_shown(name)}`" for name in names), verdict]
        for verdict, names in passing.items()
    ]
    rows += [[f"`{_shown(name)}`", what] for name, what in files.items()]
    rows.append([f"all others that end with {suffixes}", "refused"])
    rows.append(["everything else, such as `README.md`, `added_tokens.json`", "pass"])
    contents = [
        [WORDS[feature], *(cells[writer.name] for writer in WRITERS)]
        for feature, cells in verdicts().items()
    ]
    noted = dict.fromkeys(note.feature for note in NOTES)
    others = [[WORDS[Feature(each)], *(_treatment(each, of) for of in ENGINES)] for each in noted]
    forms = [[each.name, each.trainers, each.tensors, each.note] for each in EXPERT_FORMS]
    return {
        "keys": ", ".join(f"`{key}`" for key in FOREIGN) + ".",
        "experts": _table(("form", "written by", "tensors below `<experts>`", "notes"), forms),
        "engines": _table(("content", *ENGINES.values()), _merged(others)),
        "trainers": _table(
            ("trainer", "tensors"), _merged([[each.name, each.tensors] for each in TRAINERS])
        ),
        "contents": _table(("content", *(writer.name for writer in WRITERS)), _merged(contents)),
        "files": _table(("file (regular expression)", "verdict"), rows),
    }


def _merged(rows: Iterable[list[str]]) -> list[list[str]]:
    """Returns the rows, with the first cells of rows that are otherwise equal in one row."""
    firsts: dict[tuple[str, ...], list[str]] = {}
    for first, *others in rows:
        firsts.setdefault(tuple(others), []).append(first)
    return [["; ".join(names), *others] for others, names in firsts.items()]


def replaced(page: str, tables: Mapping[str, str]) -> str:
    """Returns the page with these tables between its marks. Raises KeyError for a missing mark."""
    for name, table in tables.items():
        start, end = f"<!-- adapters: {name} -->\n", "<!-- end -->"
        before, found, rest = page.partition(start)
        if not found or end not in rest:
            raise KeyError(name)
        page = f"{before}{start}{table}\n{rest[rest.index(end) :]}"
    return page


def _treatment(feature: str, engine: Engine) -> str:
    """Returns the words on an engine's treatment of a feature."""
    found = [each for each in NOTES if (each.feature, each.engine) == (feature, engine)]
    return "; ".join(f"{each.does}: {each.what}" for each in found) or "as PEFT"


def _verdict(verdict: str, files: Mapping[str, str]) -> dict[str, str]:
    return {name: f"{verdict}: {what}" for name, what in files.items()}


def _shown(pattern: str) -> str:
    return re.sub(r"\|", r"\\|", pattern)


def _table(columns: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(columns)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def main() -> None:
    PATH.write_text(replaced(PATH.read_text(), render()))


if __name__ == "__main__":
    main()
