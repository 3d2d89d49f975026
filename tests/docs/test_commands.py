"""The commands that the documents show: all are understood, and those that can run here do."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer.main
import yaml

from adapter_store.config import StoreSettings
from bench.gpu_run import __main__ as gpu_run
from inference_svc.config import InferenceSettings
from loadout import Client
from loadout.cli.__main__ import main
from loadout.cli.app import app
from loadout.demo.adapters import ADAPTERS, MODEL
from loadout.demo.given import INFERENCE_PREFIX, STORE_PREFIX
from loadout.demo.system import FREE_PORT
from loadout.health.__main__ import parse_arguments
from servicekit.settings.describe import describe
from servicekit.settings.load import parse_flags
from servicekit.settings.service import ServiceSettings
from tests.docs.commands_elsewhere import ELSEWHERE
from tests.support import forks
from tests.support.servers.hub_server import HUB_VARIABLES, HubServer, Repo
from tests.support.up import FORKED, LITTLE_MEMORY, Up
from tests.support.wait import until
from tools.house import PACKAGES
from tools.pages.cli_docs import MARKER, PATH

ROOT = Path(__file__).parents[2]
REFERENCE = PATH.read_text().partition(MARKER)[2]
"""The page's examples are those of --help, which tests/loadout/cli/test_commands.py parses."""
PAGES = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "ARCHITECTURE.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
            "bench/README.md",
        )
    ),
    *sorted(path for folder in ("docs", "deploy") for path in (ROOT / folder).rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
FENCE = re.compile(r"^ *```(.*)$", re.MULTILINE)
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FUNCTION = re.compile(r"^(\w+)\(\) \{ (.*?) \"\$@\".*\}$", re.MULTILINE)
"""A function of a block, and what it hands its arguments on to."""
SHELLS = {"sh", "bash", "shell", "console"}
LANGUAGES = {
    "sh": "commands: understood here, and run",
    "console": "commands after a prompt, with what they print",
    "python": "tests/system/test_python_examples.py, and README's here",
    "js": "tests/agents/node/flow.mjs",
    "yaml": "parsed here, and applied by tests/deploy",
    "toml": "parsed here",
    "promql": "tests/docs/test_docs_names.py",
    "mermaid": "a picture",
    "text": "what something prints, or is laid out as",
}
"""The languages of blocks, and what checks them."""

SERVICES: dict[str, type[ServiceSettings]] = {
    each.module: each for each in (StoreSettings, InferenceSettings)
}
HANDED_ON = {"store_flags": StoreSettings, "serve_flags": InferenceSettings}
"""Options whose values are flags of a service."""
COMMANDS = {each.command.split()[1]: each for each in SERVICES.values()}

GROUP = typer.main.get_command(app)

PROGRAMS = {
    "docker",
    "git",
    "kind",
    "kubectl",
    "node",
    "npm",
    "openssl",
    "pg_dump",
    "pg_restore",
    "pip",
    "vllm",
}
"""Programs that this machine may not have."""
TOOLS = {".", "cat", "cd", "cp", "curl", "export", "grep", "mkdir", "printf", "sed", "umask"}
"""Programs of the shell and of every machine."""
LASTING = {"demo", "up", "store", "serve"}
"""Commands that start services."""
NOT_RUN = {"profile", "bench", "convert"}
"""Commands of the client that need requests while they run, a minute, or an adapter that was
trained on a changed base."""
USUAL = {
    "127.0.0.1:7070": "store",
    "127.0.0.1:7071": "store_metrics",
    "127.0.0.1:7080": "inference",
    "127.0.0.1:7081": "inference_metrics",
}


@dataclass(frozen=True)
class Command:
    """A program with its arguments, as a page shows it."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yields (language, text) of a page's blocks."""
    yield from BLOCK.findall(page.read_text())


def lines(language: str, text: str) -> Iterator[str]:
    """Yields the lines that a reader types: no output of commands and no input of programs."""
    text = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", text.replace("\\\n", " "), flags=re.M | re.S)
    for line in text.splitlines():
        if language != "console":
            yield line
        elif line.startswith("$ "):
            yield line[2:]


def commands(page: Path) -> Iterator[Command]:
    name = page.relative_to(ROOT).as_posix()
    for language, text in blocks(page):
        if language in SHELLS:
            functions = dict(FUNCTION.findall(text))
            text = FUNCTION.sub("", text)
            for line in lines(language, text):
                for words in simple_commands(line):
                    expanded = shlex.split(functions.get(words[0], words[0])) + words[1:]
                    yield Command(name, tuple(expanded))


def simple_commands(line: str) -> Iterator[list[str]]:
    """Yields the commands of a line of shell, without redirections and assignments."""
    found = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    found.whitespace_split = True
    words: list[str] = []
    tokens = list(found)
    for index, token in enumerate(tokens):
        if token in ("|", "||", "&", "&&", ";"):
            yield from [words] if words else []
            words = []
        elif token in ("<", ">", ">>", ">&"):
            if words and words[-1] in ("1", "2"):
                words.pop()
        elif index and tokens[index - 1] in ("<", ">", ">>", ">&"):
            continue
        elif words or not re.fullmatch(r"\w+=.*", token):
            words.append(token)
    yield from [words] if words else []


ALL = [command for page in PAGES for command in commands(page)]


INLINE = re.compile(r"`((?:loadout -?-?[a-z]|python -m )[^`\n]*)`")


SAID = re.compile(r"loadout [a-z]+(?: [\w./{}-]+)*?(?: --[a-z-]+)+")
"""A command with flags, in help or a message."""


def mentions() -> Iterator[Command]:
    """Yields the commands that pages' sentences and tables, help and messages mention; parts of
    them may be left out."""
    sources = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    for paths, pattern in ((PAGES, INLINE), (sources, SAID)):
        for path in paths:
            for text in pattern.findall(path.read_text()):
                yield Command(path.relative_to(ROOT).as_posix(), tuple(text.split()))


def is_client(command: Command) -> bool:
    program, *rest = command.words
    return program == "loadout" and rest[0] not in {*LASTING, *NOT_RUN}


def refused(commands: Iterable[Command], check: Callable[[Command], None]) -> dict[str, str]:
    """Returns what `check` says of each command that it refuses, once."""
    found = {}
    for command in dict.fromkeys(commands):
        try:
            check(command)
        except (Exception, SystemExit) as error:
            found[str(command)] = repr(error)
    return found


def test_commands_are_understood() -> None:
    assert refused(ALL, understand) == {}


def understand(command: Command) -> None:
    """Raises what the program raises that does not know the command."""
    program, *arguments = command.words
    if program == "loadout":
        understand_loadout(arguments)
    elif program == "python":
        understand_module(arguments)
    elif program == "make":
        understand_make(arguments)
    elif program == "tools/gpu_run.sh":
        gpu_run.make_parser().parse_args(arguments)
    else:
        assert program in TOOLS | PROGRAMS


def understand_loadout(arguments: list[str]) -> None:
    """Parses as the command itself does; raises what it raises."""
    with GROUP.make_context("loadout", list(arguments)) as context:
        name, command, rest = GROUP.resolve_command(context, arguments)
        if name in COMMANDS:
            parse_flags(COMMANDS[name], rest)
        else:
            with command.make_context(name, rest, parent=context) as own:
                for option, service in HANDED_ON.items():
                    parse_flags(service, shlex.split(own.params.get(option, "")))


def test_mentions_are_of_what_there_is() -> None:
    assert refused(mentions(), check_flags) == {}


def check_flags(command: Command) -> None:
    """Raises if the command is not there, or lacks a flag."""
    if command.words[0] == "python":
        _, _, module, *arguments = command.words
        assert find_spec(module) is not None
        if arguments:
            understand_module(["-m", module, *arguments])
        return
    _, name, *_ = command.words
    given = {word.split("=")[0] for word in command.words[1:] if word.startswith("--")}
    if name.startswith("--"):
        own = GROUP
    elif name in COMMANDS:
        known = {flag for each in describe(COMMANDS[name]) for flag in each.flags}
        assert given <= known | {"--help", "--help-all"}
        return
    else:
        own = GROUP.commands[name]
    assert given <= {flag for each in own.params for flag in (*each.opts, *each.secondary_opts)}


def understand_module(arguments: list[str]) -> None:
    if arguments[:1] != ["-m"]:
        assert arguments[0] == "-" or (ROOT / arguments[0]).is_file(), "or from standard input"
        return
    module, rest = arguments[1], arguments[2:]
    if module in SERVICES:
        parse_flags(SERVICES[module], rest)
    elif module == "loadout.health":
        parse_arguments(rest)
    else:
        spec = find_spec(module)
        assert spec is not None, module
        assert spec.origin is not None
        source = Path(spec.origin.replace("__init__", "__main__")).read_text()
        ours = rest[: rest.index("--")] if "--" in rest else rest
        for flag in (word for word in ours if word.startswith("--")):
            assert f'"{flag.split("=")[0]}"' in source, f"{module} has no {flag}"
        parse_flags(InferenceSettings, rest[len(ours) + 1 :])


def understand_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in arguments:
        name, is_variable, _ = word.partition("=")
        form = rf"\$\({name}\)" if is_variable else rf"^{name}:"
        assert re.search(form, makefile, re.MULTILINE), f"Makefile has no {name}"


def test_every_page_is_read() -> None:
    """The parser sees what a reader sees."""
    programs = {command.words[0] for command in ALL}
    assert {"loadout", "python", "make", "kubectl", "docker", "curl"} <= programs
    shown = {command.words[1] for command in ALL if command.words[0] == "loadout"}
    assert {"up", "store", "serve", "register", "generate", "token", "debug", "bench"} <= shown


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like this checkout with its environment, and may be written to."""
    folder = tmp_path_factory.mktemp("checkout")
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    return folder


def readme_blocks(language: str) -> list[str]:
    return [text for each, text in blocks(ROOT / "README.md") if each == language]


@pytest.fixture(scope="module")
def up(checkout: Path) -> Iterator[Up]:
    """The system that README starts, started as README says."""
    text = "\n".join(readme_blocks("sh"))
    [command] = [line for line in text.splitlines() if line.startswith("loadout up")]
    with Up(tuple(shlex.split(command)[2:]), checkout, FORKED) as system:
        with Client(store=system.addresses["store"]) as client:
            client.register("shout", ADAPTERS / "upper")  # which pages call so
        yield system


def at(up: Up, text: str) -> str:
    """Returns `text` with the usual addresses replaced by those that this system has."""
    for usual, name in USUAL.items():
        text = text.replace(usual, up.addresses[name])
    return text


def environment_of_shells() -> dict[str, str]:
    """Returns one in which this environment's programs run this checkout, `loadout` as forks."""
    path = f"{forks.programs()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


def run(up: Up, text: str, cwd: Path) -> str:
    """Returns what a shell prints that runs `text`."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", at(up, text)],
        cwd=cwd,
        env={**environment_of_shells(), **up.environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.processes
def test_readme_runs(up: Up, checkout: Path) -> None:
    """Each block as a whole."""
    texts = [text for text in readme_blocks("sh") if "loadout up" not in text]
    if not shutil.which("curl"):
        texts = [text for text in texts if "curl" not in text]
    assert "HELLO" in "".join(run(up, text, checkout) for text in texts)
    for text in readme_blocks("python"):
        assert "HELLO" in run(up, f"python -c {shlex.quote(text)}", checkout)


SECURITY = "docs/security.md"
CLIENT_COMMANDS = [
    each
    for each in dict.fromkeys(ALL)
    if is_client(each) and each.page not in ("README.md", SECURITY)
]
SERVICE_COMMANDS = [each for each in ALL if each.page == "docs/configuration.md"]
[SIZING] = [each for each in ALL if each.words[:3] == ("python", "-m", "tools.sizing")]
SIGNING = ["keygen", "sign"]


@pytest.mark.processes
def test_signing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the registration, which needs a store that trusts the key."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "french").symlink_to(ADAPTERS / "upper")
    monkeypatch.chdir(tmp_path)
    ran = []
    for command in (each for each in ALL if each.page == SECURITY):
        name = command.words[1]
        if command.words[0] == "loadout" and name in SIGNING:
            with forks.forked_commands():
                assert main(list(command.words[1:])) == 0
            ran.append(name)
    assert ran == SIGNING


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("command", CLIENT_COMMANDS, ids=str)
def test_client_command_runs(
    up: Up, checkout: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in up.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(checkout)
    _, *arguments = (at(up, word) for word in command.words)
    assert main(arguments) == 0


@pytest.mark.slow
@pytest.mark.processes
def test_sizing_runs(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, module, *arguments = SIZING.words
    places = {"DIR": "loadout/demo/assets/model"}
    monkeypatch.chdir(checkout)
    done = forks.run(module, *(places.get(word, word) for word in arguments))
    assert done.returncode == 0, done.stderr
    assert "image of one adapter" in done.stdout


def is_run_here(command: Command) -> bool:
    """Returns whether a test below runs it."""
    if command.page == "README.md":
        return command.words[0] != "make"
    if command.page == SECURITY:
        return command.words[1] in SIGNING
    return command in {*CLIENT_COMMANDS, *SERVICE_COMMANDS, SIZING}


def test_every_command_is_run() -> None:
    """Here, or by another test, which is there and says so."""
    used = set()
    for command in dict.fromkeys(ALL):
        if not is_run_here(command):
            found = [each for each in ELSEWHERE if re.fullmatch(each.pattern, str(command))]
            assert found, f"{command}: no test runs it"
            used.add(found[0])
    assert used == {*ELSEWHERE}
    for each in ELSEWHERE:
        assert each.text in (ROOT / each.place).read_text(), each


@pytest.mark.slow
@pytest.mark.processes
def test_files_of_settings_are_served(checkout: Path, tmp_path: Path) -> None:
    """Both services, with the files and commands that the page has; only their ports are free
    ones, and their memory is little, by variables."""
    started = []
    for command in SERVICE_COMMANDS:
        prefix = {"store": STORE_PREFIX, "serve": INFERENCE_PREFIX}[command.words[1]]
        ready = tmp_path / f"{prefix}ready"
        free = {f"{prefix}{name}": FREE_PORT for name in ("LISTEN", "METRICS_LISTEN")}
        own = {**free, f"{prefix}READY_FILE": str(ready), **LITTLE_MEMORY}
        environment = {**environment_of_shells(), **own}
        popen = subprocess.Popen(
            ["bash", "-c", f"exec {shlex.join(command.words)}"],
            cwd=checkout,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append((popen, ready))
    for popen, ready in started:
        until(lambda r=ready, p=popen: r.exists() or p.poll() is not None, what=str(ready))
        popen.terminate()
    for popen, _ in started:
        _, stderr = popen.communicate(timeout=90)
        assert popen.returncode == 0, stderr


@pytest.mark.slow
@pytest.mark.processes
def test_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's command, with a hub of ours that has the demo's model under that name."""
    [command] = {each for each in mentions() if each.page == "README.md" and "up" in each.words}
    *_, name = command.words
    hub = HubServer()
    hub.repos[name] = repo = Repo()
    repo.commit({path.name: path.read_bytes() for path in MODEL.iterdir()})
    for variable in HUB_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in hub.environment(tmp_path / "hub").items():
        monkeypatch.setenv(variable, value)
    try:
        with (
            Up(command.words[2:], tmp_path, FORKED) as system,
            Client(inference=system.addresses["inference"]) as client,
        ):
            assert client.server_info().base_model == name
            assert client.complete("hello=", max_tokens=1).usage.completion_tokens == 1
    finally:
        hub.stop()


def test_no_command_hides() -> None:
    """Shell has one name, transcripts start with a prompt, and nothing is left to be filled in."""
    for page in PAGES:
        opened = FENCE.findall(page.read_text())[::2]
        assert [language for language in opened if language not in LANGUAGES] == [], page
        for language, text in blocks(page):
            assert language != "console" or text.startswith("$ "), page
            hides = language == "text" and re.match(r"\$ |loadout |python |make ", text)
            assert not hides or text in REFERENCE, page
        assert not re.search("@[A-Z]+@", page.read_text()), page


@pytest.mark.slow
def test_other_blocks_parse() -> None:
    for page in PAGES:
        for language, text in blocks(page):
            text = textwrap.dedent(text)
            if language == "python":
                compile(text, str(page), "exec")
            elif language == "yaml":
                assert all(yaml.safe_load_all(text)), page
            elif language == "toml":
                assert tomllib.loads(text), page
