"""Writes docs/configuration.md and examples/settings/*.toml from the settings of both services.

python -m tools.pages.configuration_docs
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
from servicekit.settings.types import Level

ROOT = Path(__file__).parents[2]
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

This page lists every setting of the adapter store (`loadout store`) and the inference service
(`loadout serve`). `loadout store --help` and `loadout serve --help` show the settings that most
installations need, and `--help-all` shows all of them. The tables mark common settings in bold.

## How to give a setting

You can give the setting `max-loras` of the inference service in three ways:

| way | example |
|---|---|
| flag | `--max-loras 128` or `--max-loras=128` |
| environment variable | `LOADOUT_INFERENCE_MAX_LORAS=128` (`LOADOUT_STORE_...` for the store) |
| key of a TOML file, given by `--config FILE` | `max-loras = 128` or `max_loras = 128` |

A flag overrides the variable, the variable overrides the file, and the file overrides the default.

- **Switches** have two flags: `--prefix-cache` turns one on, `--no-prefix-cache` turns it off. In
  the environment and the file, write `true` or `false`.
- **Lists** are separated by commas. You can repeat the flag, and use an array in the file.
- **Settings without a flag** are rarely needed. Give them in the file or in the environment.
- **The file** may also be named by `LOADOUT_STORE_CONFIG` or `LOADOUT_INFERENCE_CONFIG`.
  [store.toml](../examples/settings/store.toml) and
  [inference.toml](../examples/settings/inference.toml) contain every setting with its default:

```sh
{commands}
```

- **Relative paths** start at the folder in which you start the service.
- **Mistakes**: a wrong value, an unknown flag or key, or a contradiction between values ends the
  start with exit status 2. The status is 1 if the service notices the mistake only when it uses the
  settings: a file that it cannot read, a certificate without its key, an address that other
  machines can reach without `--policy-file`, a port in use, too little memory. For status 2 the
  service prints one line per problem with the flag, the variable, or the file and key. An unknown
  variable with the service's prefix is logged as a warning.
- **`loadout up`** starts both services with their variables and files. `--store-flags` and
  `--serve-flags` pass flags on, and `up` chooses what you leave open. If
  `LOADOUT_INFERENCE_STORE` names a store, `up` starts none.
- `python -m adapter_store` and `python -m inference_svc` take the same flags.

## Types

| type | values |
|---|---|
| `SIZE` | bytes, such as `64 GiB`, `64Gi` or `536870912` |
| `SECONDS`, `NUMBER` | a number, which may have a fraction |
| `N` | an integer |
| `HOST:PORT` | an address, always with a port; IPv6 in brackets, such as `[::1]:7070` |
| `MODEL` | a folder or a name on the Hugging Face Hub |

Sizes in memory have `memory` in their names; sizes on disk and of files end in `-bytes`.

See also the flags of [other commands](cli.md), the [policy file](security.md) and
[how to choose sizes](operations/sizing.md).
"""
NO_FLAG = "settings without a flag"


def render() -> str:
    """Returns the page."""
    commands = "\n".join(
        f"{service.command} --config {path.relative_to(ROOT)}" for path, service in EXAMPLES.items()
    )
    parts = [INTRODUCTION.format(commands=commands)]
    for title, service in SERVICES.items():
        parts.append(f"\n## {title}\n")
        settings = describe(service)
        with_flags = [setting for setting in settings if setting.has_flag]
        for group, members in groupby(with_flags, key=lambda setting: setting.group):
            parts.append(f"\n### {title}: {group.title[0].lower()}{group.title[1:]}\n")
            parts.append(_table(list(members)))
        parts.append(f"\n### {title}: {NO_FLAG}\n")
        parts.append(_table([setting for setting in settings if not setting.has_flag]))
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def render_example(service: type[ServiceSettings]) -> str:
    """Returns a file with the required settings, and all others as comments."""
    lines = [
        f"# All settings of `{service.command} --config FILE`, with their defaults, or with an",
        "# example where there is no default. Remove the # before a setting to change it.",
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
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for setting in settings:
        name = f"`{setting.key}`"
        name = f"**{name}**" if setting.level is Level.COMMON else name
        kind = f"`{setting.metavar}`" if setting.metavar else "switch"
        kind = " ".join([kind, *setting.bounds]).replace("|", "\\|")
        default = setting.default_words if setting.default else ""
        default = "required" if setting.is_required else default
        meaning = re.sub(r"(?<!\S)--[a-z0-9-]+", r"`\g<0>`", setting.meaning)
        rows.append(f"| {name} | {kind} | {default} | {meaning} |")
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
    "stored-states": "64",
    "max-prompt-images": "8",
    "KEY,...": "trainer_version",
    "UID,...": "65532",
    "URL": "http://127.0.0.1:4317",
    "SIZE": "4GiB",
    "HOST[:PORT],...": "images.example.com,cdn.example.com:8443",
    "LEADER:PORT": "10.0.0.1:29500",
    "TOKEN": "a secret that all machines have",
}
"""Values of settings without a default, by their key or by the form of their values."""


def _value(setting: Setting) -> str:
    """Returns a setting's default or sample in TOML."""
    sample = SAMPLES.get(setting.key) or SAMPLES.get(setting.metavar)
    text = setting.default or sample or f"/path/to/{setting.key}"
    if setting.is_list:
        return "[" + ", ".join(f'"{part}"' for part in text.split(",")) + "]"
    is_bare = not setting.metavar or setting.metavar in ("N", "NUMBER", "SECONDS")
    return text if is_bare else f'"{text}"'


def main() -> None:
    PATH.write_text(render())
    for path, service in EXAMPLES.items():
        path.write_text(render_example(service))


if __name__ == "__main__":
    main()
