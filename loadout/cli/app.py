"""The commands, put together. Each lives in the module that is named for its task."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import typer

from loadout.cli.adapters import (
    adapters,
    check,
    convert,
    inspect,
    layouts,
    residents,
    signing,
    strip,
    verify,
    versions,
)
from loadout.cli.help import HELP_ALL, HelpCommand
from loadout.cli.local import demo, download, quantize, services, token
from loadout.cli.server import bench, debug, generate, info, life_cycle, pool, profile, top


class Commands(typer.Typer):
    """Commands with the help of HelpCommand."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        return super().command(name, **{"cls": HelpCommand, **options})


# Plain help: it keeps the examples' line breaks and reads the same in a log as on a terminal.
app = Commands(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help", HELP_ALL], "max_content_width": 100},
)


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"loadout {version('loadout')}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="""\b
Examples:
  loadout demo
  loadout COMMAND --help
  loadout --install-completion
""",
)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    """Serve one large language model with thousands of LoRA adapters.

    Try it: `loadout demo`. Leave it running: `loadout up`.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("demo", epilog=demo.DEMO_EXAMPLES)(demo.run_demo)
app.command("up", epilog=demo.UP_EXAMPLES)(demo.run_up)
app.command("download", epilog=download.EXAMPLES)(download.download)
app.command("quantize", epilog=quantize.EXAMPLES)(quantize.quantize)
app.command("store", add_help_option=False, context_settings=services.PASS_ON)(services.run_store)
app.command("serve", add_help_option=False, context_settings=services.PASS_ON)(services.run_serve)
app.command("register", epilog=adapters.REGISTER_EXAMPLES)(adapters.register)
app.command("adapters", epilog=adapters.LIST_EXAMPLES)(adapters.list_adapters)
app.command("check", epilog=check.EXAMPLES)(check.check)
app.command("layouts", epilog=layouts.EXAMPLES)(layouts.layouts)
app.command("versions", epilog=versions.VERSIONS_EXAMPLES)(versions.versions)
app.command("rollback", epilog=versions.ROLLBACK_EXAMPLES)(versions.rollback)
app.command("prune", epilog=versions.PRUNE_EXAMPLES)(versions.prune)
app.command("delete", epilog=versions.DELETE_EXAMPLES)(versions.delete)
app.command("generate", epilog=generate.EXAMPLES)(generate.generate)
app.command("embed", epilog=pool.EMBED_EXAMPLES)(pool.embed)
app.command("classify", epilog=pool.CLASSIFY_EXAMPLES)(pool.classify)
app.command("load", epilog=residents.LOAD_EXAMPLES)(residents.load)
app.command("unload", epilog=residents.UNLOAD_EXAMPLES)(residents.unload)
app.command("pin", epilog=residents.PIN_EXAMPLES)(residents.pin)
app.command("unpin", epilog=residents.UNPIN_EXAMPLES)(residents.unpin)
app.command("residents", epilog=residents.RESIDENTS_EXAMPLES)(residents.residents)
app.command("inspect", epilog=inspect.EXAMPLES)(inspect.inspect)
app.command("pause", epilog=life_cycle.PAUSE_EXAMPLES)(life_cycle.pause)
app.command("resume", epilog=life_cycle.RESUME_EXAMPLES)(life_cycle.resume)
app.command("sleep", epilog=life_cycle.SLEEP_EXAMPLES)(life_cycle.sleep)
app.command("wake", epilog=life_cycle.WAKE_EXAMPLES)(life_cycle.wake)
app.command("info", epilog=info.EXAMPLES)(info.info)
app.command("top", epilog=top.EXAMPLES)(top.top)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.command("verify", epilog=verify.EXAMPLES)(verify.verify)
app.command("debug", epilog=debug.EXAMPLES)(debug.debug)
app.command("profile", epilog=profile.EXAMPLES)(profile.profile)
app.command("digest", epilog=signing.DIGEST_EXAMPLES)(signing.digest)
app.command("strip", epilog=strip.EXAMPLES)(strip.strip)
app.command("convert", epilog=convert.EXAMPLES)(convert.convert)
app.command("keygen", epilog=signing.KEYGEN_EXAMPLES)(signing.keygen)
app.command("sign", epilog=signing.SIGN_EXAMPLES)(signing.sign)
app.command("token", epilog=token.EXAMPLES)(token.token)
