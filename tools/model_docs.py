"""Writes docs/models.md: the families of models, as their modules describe them.

python -m tools.model_docs
"""

from __future__ import annotations

import sys
from pathlib import Path

from inference_svc.model.architectures import families

PATH = Path(__file__).parent.parent / "docs" / "models.md"
PAGE = """\
# Models

The inference service computes models whose `config.json` names one of these architectures, in
fp32, bf16 or fp16, on CPUs and on GPUs. Adapters may change every linear layer, the embedding and
the head. Each family is one module of data: [how to add one](development/add-an-architecture.md).

| architecture | |
|---|---|
{rows}

`config.json` decides what of it a model has. A value that would change the maths and is not
computed is refused at start by its key, as are tensors that are missing, unexpected or of another
shape.
"""


def render() -> str:
    """Returns the page: a row for each module, in its own words."""
    names: dict[str, list[str]] = {}
    for name, family in families().items():
        names.setdefault(family.describe.__module__, []).append(f"`{name}`")
    rows = [
        f"| {', '.join(found)} | {' '.join((sys.modules[module].__doc__ or '').split())} |"
        for module, found in sorted(names.items())
    ]
    return PAGE.format(rows="\n".join(rows))


def main() -> None:
    PATH.write_text(render())


if __name__ == "__main__":
    main()
