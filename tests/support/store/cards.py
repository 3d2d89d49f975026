"""The README that PEFT writes beside an adapter. It compiles its template anew each time, which is
slower than all else. Here it makes one, which is copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest

_original = peft.PeftModel.create_or_update_model_card
_made: list[str] = []


def _copy(model: Any, output_dir: str) -> None:
    path = Path(output_dir) / "README.md"
    if _made:
        path.write_text(_made[0])
    else:
        _original(model, output_dir)
        _made.append(path.read_text())


@contextmanager
def copied_cards() -> Iterator[None]:
    """PEFT copies the first README meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.PeftModel, "create_or_update_model_card", _copy)
        yield
