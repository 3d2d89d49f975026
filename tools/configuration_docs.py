"""Writes docs/configuration.md and examples/settings/*.toml from the settings of both services.

python -m tools.configuration_docs
"""

from __future__ import annotations

import re
import textwrap
from itertools import groupby
from pathlib import Path

from adapter_store.config import StoreSettings
from inference_svc.config import InferenceSettings
from servicekit.settings.describe import Setting, describe
from servicekit.settings.service import ServiceSettings

ROOT = Path(__file__).parent.parent
PATH = ROOT / "docs" / "configuration.md"
SERVICES: dict[str, type[ServiceSettings]] = {
    "Adapter store": StoreSettings,
    "Inference service": InferenceSettings,
}
EXAMPLES: dict[Path, type[ServiceSettings]] = {
    ROOT / "examples" / "settings" / "store.toml": StoreSettings,
    ROOT / "examples" / "settings" / "inference.toml": InferenceSettings,
}
DEMO_MODEL = "loadout/demo/assets/model"
LINE_WIDTH = 100

INTRODUCTION = """# Configuration

Every setting of both services is a flag, an environment variable and a key of a TOML file, in one
style. This page is made from the settings in the code by `make docs`.

**Precedence**: a flag wins over the environment variable, the variable over the file, the file
over the default. `loadout store` and `python -m adapter_store` take the same flags, and so do
`loadout serve` and `python -m inference_svc`. `loadout up` starts both services with their
variables and files, and hands on what `--store-flags` and `--serve-flags` name; what none of them
gives it chooses. Told of another store by `LOADOUT_INFERENCE_STORE`, it starts none.

**Flags** are `--NAME VALUE` or `--NAME=VALUE`. A switch has two: `--prefix-cache` turns it on,
`--no-prefix-cache` off. Lists are separated by commas; the flag of a list may also be repeated.

**Environment variables** have the prefix `LOADOUT_STORE_` or `LOADOUT_INFERENCE_`. Those of a
switch are `true` or `false`.

**File**: `--config FILE.toml`, or the variable `LOADOUT_STORE_CONFIG` or
`LOADOUT_INFERENCE_CONFIG`. Its keys are the flags' names without `--`; `_` may stand for `-`.
Lists may be arrays. An unknown key is refused by its name; a variable with the service's prefix
that is no setting is logged as a warning at start. Paths are relative to the folder that
the service is started in. [store.toml](../examples/settings/store.toml) and
[inference.toml](../examples/settings/inference.toml) have every setting with its default:

```sh
{commands}
```

**Types**: `SIZE` is a number of bytes, such as `64 GiB`, `64Gi` or `536870912`. Sizes in
memory have `memory` in their names, sizes on disk and of files end with `-bytes`.
`SECONDS` and `NUMBER` may have a fraction, `N` has none. `HOST:PORT` takes IPv6 addresses in
brackets, such as `[::1]:7070`. `MODEL` is a folder or a name on the Hugging Face Hub. A log level
may be written in any case.

A wrong value ends the start with exit status 2 and a line for each problem, which names the flag,
the variable or the file and key where it stands.

The commands of the client have their own flags and variables: see [command line](cli.md). What
the policy file holds is in [security](security.md), what sizes to choose in
[sizing](operations/sizing.md).
"""


def render() -> str:
    """Returns the page."""
    commands = "\n".join(
        f"{service.command} --config {path.relative_to(ROOT)}" for path, service in EXAMPLES.items()
    )
    parts = [INTRODUCTION.format(commands=commands)]
    for title, service in SERVICES.items():
        parts.append(f"\n## {title}\n")
        for group, settings in groupby(describe(service), key=lambda setting: setting.group):
            parts.append(f"\n### {title}: {group.title[0].lower()}{group.title[1:]}\n")
            parts.append(_table(list(settings)))
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def render_example(service: type[ServiceSettings]) -> str:
    """Returns a file with every setting: those that are required set, the others as comments."""
    lines = [
        f"# Settings of `{service.command} --config FILE`: every one of them, with its default, or",
        "# with a sample value where there is none. Remove the # before a setting to change it.",
    ]
    for group, settings in groupby(describe(service), key=lambda setting: setting.group):
        lines += ["", "", f"# {group.title}", f"# {'-' * len(group.title)}"]
        for setting in settings:
            if setting.name != "config":
                mark = "" if setting.is_required else "#"
                lines += [
                    "",
                    *_comment(setting.meaning),
                    f"{mark}{setting.key} = {_value(setting)}",
                ]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    lines = textwrap.wrap(text, LINE_WIDTH - 2, break_on_hyphens=False, break_long_words=False)
    return [f"# {line}" for line in lines]


def _table(settings: list[Setting]) -> str:
    rows = [
        "| flag | environment variable | file key | type | default | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for setting in settings:
        flags = ", ".join(f"`{flag}`" for flag in setting.flags)
        kind = f"`{setting.metavar}`" if setting.metavar else "switch"
        kind = " ".join([kind, *setting.bounds]).replace("|", "\\|")
        default = setting.default_words if setting.default else ""
        default = "required" if setting.is_required else default
        key = "" if setting.name == "config" else f"`{setting.key}`"
        meaning = re.sub(r"(?<!\S)--[a-z0-9-]+", r"`\g<0>`", setting.meaning)
        rows.append(f"| {flags} | `{setting.variable}` | {key} | {kind} | {default} | {meaning} |")
    return "\n".join(rows)


SAMPLES = {
    "model": DEMO_MODEL,
    "base-model": "loadout-demo",
    "aliases": "demo",
    "store": "127.0.0.1:7070",
    "http": "127.0.0.1:8000",
    "s3-region": "eu-central-1",
    "s3-buckets": "my-bucket/adapters",
    "hf-organizations": "my-organization",
    "source-roots": "/srv/adapters",
    "catalog-dsn": "postgresql+psycopg://loadout@postgres.example/loadout",
    "shared-s3": "s3://my-bucket/store",
    "trace-sample-ratio": "0.1",
    "KEY,...": "trainer_version",
    "URL": "http://127.0.0.1:4317",
    "SIZE": "4GiB",
}
"""Values of settings without a default, by their key or by the form of their values."""


def _value(setting: Setting) -> str:
    """Returns a setting's default or sample as TOML writes it."""
    sample = SAMPLES.get(setting.key) or SAMPLES.get(setting.metavar)
    text = setting.default or sample or f"/path/to/{setting.key}"
    if setting.is_list:
        return f'["{text}"]'
    is_bare = not setting.metavar or setting.metavar in ("N", "NUMBER", "SECONDS")
    return text if is_bare else f'"{text}"'


def main() -> None:
    PATH.write_text(render())
    for path, service in EXAMPLES.items():
        path.write_text(render_example(service))


if __name__ == "__main__":
    main()
