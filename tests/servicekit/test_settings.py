"""The settings that both services have, and the one way in which settings are read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from adapter_store.config import StoreSettings
from inference_svc.config import InferenceSettings
from servicekit.errors import InvalidSetting
from servicekit.settings.addresses import split_address
from servicekit.settings.describe import describe, duration, help_text, size
from servicekit.settings.load import load_settings, standard_endpoint, unknown_variables
from servicekit.settings.service import ServiceSettings
from servicekit.settings.types import Level, check_endpoint

SERVICES = [StoreSettings, InferenceSettings]
SWITCHES = {"adapter_store": "compile-ahead", "inference_svc": "prefetch"}
LISTS = {"adapter_store": "source-roots", "inference_svc": "aliases"}
Load = Callable[..., ServiceSettings]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LOADOUT_"):
            monkeypatch.delenv(name)


@pytest.fixture(params=SERVICES, ids=lambda service: service.module)
def service(request: pytest.FixtureRequest) -> type[ServiceSettings]:
    return request.param


@pytest.fixture
def required(service: type[ServiceSettings], tmp_path: Path) -> list[str]:
    """The flags without which the service does not start."""
    (tmp_path / "config.json").write_text("{}")
    return ["--model", str(tmp_path)] if service is InferenceSettings else []


@pytest.fixture
def load(service: type[ServiceSettings], required: list[str]) -> Load:
    return lambda *arguments: load_settings(service, [*required, *arguments])


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "settings.toml"
        path.write_text(text)
        return str(path)

    return write


def variable(service: type[ServiceSettings], name: str) -> str:
    return f"{service.model_config['env_prefix']}{name}"


def test_defaults(load: Load) -> None:
    settings = load()
    assert split_address(settings.listen)[0] == "127.0.0.1"
    assert (settings.log_format, settings.log_level, settings.grace_seconds) == ("text", "info", 30)
    assert settings.policy_file is settings.tls_cert_file is settings.config is None
    assert not settings.allow_open_access


def test_precedence(
    service: type[ServiceSettings], load: Load, file: Callable[[str], str], monkeypatch
) -> None:
    path = file('listen = "h:1"\nmetrics-listen = "h:1"\nready_file = "r1"\n')
    monkeypatch.setenv(variable(service, "LISTEN"), "h:2")
    monkeypatch.setenv(variable(service, "METRICS_LISTEN"), "h:2")
    settings = load("--config", path, "--listen", "h:3")
    assert (settings.listen, settings.metrics_listen) == ("h:3", "h:2")
    assert settings.ready_file == Path("r1")
    assert settings.config == Path(path)


def test_the_environment_names_a_file(
    service: type[ServiceSettings], load: Load, file: Callable[[str], str], monkeypatch
) -> None:
    monkeypatch.setenv(variable(service, "CONFIG"), file("grace_seconds = 5"))
    assert load().grace_seconds == 5
    assert load("--grace-seconds", "7").grace_seconds == 7


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--{}"], True),
        (["--no-{}"], False),
        (["--{}", "true"], True),
        (["--{}=false"], False),
        (["--{}", "False", "--log-level", "info"], False),
        (["--no-{}", "--{}"], True),
    ],
)
def test_switches(
    service: type[ServiceSettings], load: Load, arguments: list[str], expected: bool
) -> None:
    for name in (SWITCHES[service.module], "allow-open-access"):
        settings = load(*(argument.format(name) for argument in arguments))
        assert getattr(settings, name.replace("-", "_")) is expected


def test_every_boolean_has_both_flags(service: type[ServiceSettings]) -> None:
    for setting in describe(service):
        is_switch = service.model_fields[setting.name].annotation is bool
        assert setting.is_switch == is_switch
        assert len(setting.flags) == (1 + is_switch if setting.has_flag else 0)


@pytest.mark.parametrize("level", ["debug", "INFO", "Warning"])
def test_log_levels_in_any_case(service: type[ServiceSettings], load: Load, level: str) -> None:
    assert load("--log-level", level).log_level == level.lower()


def test_lists(service: type[ServiceSettings], load: Load, file: Callable[[str], str]) -> None:
    name = LISTS[service.module]

    def read(*arguments: str) -> list[str]:
        return [str(each) for each in getattr(load(*arguments), name.replace("-", "_"))]

    assert read(f"--{name}", "a, b", f"--{name}=c") == ["a", "b", "c"]
    assert read("--config", file(f'{name} = ["a", "b"]')) == ["a", "b"]
    assert read("--config", file(f'{name} = "a,b"')) == ["a", "b"]
    assert read() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--listen 7070", "--listen: '7070' is not HOST:PORT"),
        ("--metrics-listen h:70000", "--metrics-listen: 'h:70000' is not HOST:PORT"),
        ("--grace-seconds -1", "--grace-seconds: must be at least 0, not '-1'"),
        ("--grace-seconds soon", "--grace-seconds: must be a number, not 'soon'"),
        ("--trace-sample-ratio 2", "--trace-sample-ratio: must be at most 1, not '2'"),
        ("--log-format xml", "--log-format: must be 'text' or 'json', not 'xml'"),
        ("--allow-open-access maybe", "--allow-open-access: must be true or false, not 'maybe'"),
        ("--otlp-endpoint host:1", "--otlp-endpoint: 'host:1' is not http(s)://HOST:PORT"),
        ("--listen", "--listen: expected one argument"),
        ("--no-allow-open-access=x", "--no-allow-open-access: ignored explicit argument 'x'"),
        ("--lisen h:1", "--lisen: there is no such flag; did you mean --listen?"),
        ("--xyzzy", "--xyzzy: there is no such flag; --help-all lists all"),
        ("--grace 1", "--grace: there is no such flag; "),
        ("word", "word: there is no such flag; "),
        ("--config nowhere.toml", "--config: nowhere.toml cannot be read: No such file"),
    ],
)
def test_wrong_flags(load: Load, arguments: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load(*arguments.split())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('lisen = "h:1"', "{}: lisen: there is no such setting; did you mean listen?"),
        ("[network]", "{}: network: there is no such setting; "),
        ('config = "other.toml"', "{}: config: there is no such setting; "),
        ("grace_seconds = 1\ngrace-seconds = 1", "{}: grace-seconds: given twice"),
        ("grace_seconds = -1", "{}: grace-seconds: must be at least 0, not -1"),
        ('log-level = "loud"', "{}: log-level: must be 'debug', 'info', 'warning' or 'error'"),
        ("listen = 7", "{}: listen: must be a text, not 7"),
        ("listen", "--config: {} is not TOML: "),
    ],
)
def test_wrong_files(load: Load, file: Callable[[str], str], text: str, message: str) -> None:
    path = file(text)
    with pytest.raises(InvalidSetting) as caught:
        load("--config", path)
    assert str(caught.value).startswith(message.format(path))


def test_wrong_variables(service: type[ServiceSettings], load: Load, monkeypatch) -> None:
    name = variable(service, "GRACE_SECONDS")
    monkeypatch.setenv(name, "-1")
    with pytest.raises(InvalidSetting, match=f"^{name}: must be at least 0"):
        load()
    # A variable of something else, such as those that Kubernetes sets for a Service.
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv(variable(service, "PORT"), "tcp://10.0.0.1:7070")
    monkeypatch.setenv(variable(service, "PORT_7070_TCP_ADDR"), "10.0.0.1")
    monkeypatch.setenv(variable(service, "SERVICE_PORT_GRPC"), "7070")
    monkeypatch.setenv("LOADOUT_INFERENCE_METRICS", "127.0.0.1:9091")
    load()
    assert unknown_variables(service) == []


def test_misspelled_variables(service: type[ServiceSettings], monkeypatch) -> None:
    wrong, right = variable(service, "LISTN"), variable(service, "LISTEN")
    monkeypatch.setenv(wrong, "h:1")
    expected = f"{wrong}: there is no such setting; did you mean {right}?"
    assert unknown_variables(service) == [expected]


def test_former_names(
    service: type[ServiceSettings], load: Load, file: Callable[[str], str], monkeypatch
) -> None:
    """Each says what the setting is called now, as it is written there."""
    settings = {setting.name: setting for setting in describe(service)}
    for former, name in service.former.items():
        key, now = former.replace("_", "-"), settings[name]
        with pytest.raises(InvalidSetting, match=f"^--{key}: is now called {now.flag}$"):
            load(f"--{key}=1")
        path = file(f"{former} = 1")
        with pytest.raises(InvalidSetting, match=f"^{path}: {former}: is now called {now.key}$"):
            load("--config", path)
        with monkeypatch.context() as environment:
            environment.setenv(variable(service, former.upper()), "1")
            with pytest.raises(InvalidSetting, match=f": is now called {now.variable}$"):
                load()


@pytest.mark.parametrize("text", ["1.5GiB", "1.5 GiB", "1.5gib", "1.5Gi", "1536Mi", "1610612736"])
def test_sizes(load: Load, text: str) -> None:
    assert load("--request-memory", text).request_memory == 3 << 29


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.5, "0.5 seconds"),
        (1, "1 second"),
        (90, "90 seconds"),
        (600, "10 minutes"),
        (604800, "7 days"),
    ],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(64 << 10, "64 KiB"), (3 << 29, "1.5 GiB"), (64 << 30, "64 GiB"), (1000, "1000 B")],
)
def test_sizes_in_words(load: Load, num_bytes: int, words: str) -> None:
    assert size(num_bytes) == words
    if num_bytes > 8 << 20:
        assert load("--request-memory", words).request_memory == num_bytes


def test_bounds_of_sizes_are_in_words(load: Load) -> None:
    with pytest.raises(InvalidSetting, match=r"must be at least [48] MiB, not '1MiB'"):
        load("--request-memory", "1MiB")


def test_help_begins_with_the_basics(service: type[ServiceSettings]) -> None:
    titles = [group.title for group in service.groups]
    assert titles[:4] == ["Basics", "Network", "Security", "Memory"]
    basics = [each.name for each in describe(service) if each.group.title == "Basics"]
    assert {"listen", "config"} < {*basics}
    assert len(basics) <= 6


def test_what_both_services_have_is_the_same() -> None:
    """A setting of both has one meaning: the same form, the same kind of default."""
    ours, theirs = ({each.name: each for each in describe(service)} for service in SERVICES)
    both = ours.keys() & theirs.keys()
    assert {"max_rank", "tenant_share", "log_level", "request_memory"} <= both
    for name in both:
        assert ours[name].metavar == theirs[name].metavar, name
        assert bool(ours[name].default) == bool(theirs[name].default), name


@pytest.mark.parametrize("service", SERVICES)
def test_sizes_of_memory_end_so(service: type[ServiceSettings]) -> None:
    """Those of memory end in -memory, and those on disk in -bytes; what is a limit or a rate says
    so."""
    ends = ("_memory", "_memory_limit", "_bytes", "_rate")
    sizes = [each.name for each in describe(service) if each.metavar == "SIZE"]
    assert [name for name in sizes if not f"_{name}".endswith((*ends, "_memory_limit"))] == []


def test_all_problems_at_once(load: Load) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load("--listen", "x", "--log-level", "y")
    assert len(str(caught.value).splitlines()) == 2


def test_secrets_stay_out_of_errors() -> None:
    with pytest.raises(InvalidSetting) as caught:
        load_settings(StoreSettings, ["--catalog-dsn", "mysql://u:s3cr3t@h/d"])
    assert "s3cr3t" not in str(caught.value)


URLS = (
    "https://us3r:s3cr3t@hub.test",
    "https://us3r:s3cr3t@hub.test:443",
    "https://us3r:s3/cr3t@hub.test/path and more",
    "us3r:s3cr3t@hub.test",
    "https//us3r:s3cr3t@hub.test",
    "one,https://us3r:s3cr3t@[hub",
    "bucket@https://us3r:s3cr3t@hub.test",
)
ADDRESSES = ("URL", "BUCKET[/PREFIX],...", "s3://BUCKET[/PREFIX]", "DSN")


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("place", ["flag", "variable", "file"])
def test_a_password_of_an_address_is_in_no_error(
    service: type[ServiceSettings],
    load: Load,
    file: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    url: str,
) -> None:
    """Whichever setting it is given to: all at once, each of which has a line."""
    settings = [each for each in describe(service) if each.name not in ("config", "model")]
    if place == "flag":
        settings = [each for each in settings if each.has_flag]
    arguments = [f"{setting.flag}={url}" for setting in settings] if place == "flag" else []
    for setting in settings if place == "variable" else ():
        monkeypatch.setenv(setting.variable, url)
    if place == "file":
        text = "".join(f"{setting.key} = '{url}'\n" for setting in settings)
        arguments = ["--config", file(text)]
    with pytest.raises(InvalidSetting) as caught:
        load(*arguments)
    assert "cr3t" not in str(caught.value)
    for setting in settings:
        if setting.metavar in ADDRESSES:
            name = {"flag": setting.flag, "variable": setting.variable, "file": setting.key}[place]
            assert f"{name}: " in str(caught.value), "it is not an address"


def test_a_password_of_an_unknown_flag_or_model_is_in_no_error(load: Load) -> None:
    for arguments in (["https://us3r:s3cr3t@hub.test"], ["--hf", "us3r:s3cr3t@hub.test"]):
        with pytest.raises(InvalidSetting) as caught:
            load(*arguments)
        assert "s3cr3t" not in str(caught.value)
    with pytest.raises(InvalidSetting, match="neither a folder nor") as caught:
        load_settings(InferenceSettings, ["--model", "https://us3r:s3cr3t@hub.test/model"])
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("url", URLS)
def test_a_password_of_a_standard_endpoint_is_in_no_error(url: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        standard_endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": url})
    assert "cr3t" not in str(caught.value)


def test_required() -> None:
    with pytest.raises(InvalidSetting, match="--model: is required"):
        load_settings(InferenceSettings, [])


def test_settings_cannot_be_changed(load: Load) -> None:
    with pytest.raises(ValidationError):
        load().listen = "127.0.0.1:1"  # type: ignore[misc]


def test_every_setting_is_described(service: type[ServiceSettings]) -> None:
    for setting in describe(service):
        assert setting.meaning.endswith("."), setting.name
        assert setting.group in service.groups, setting.name
        assert setting.metavar or setting.is_switch, setting.name


@pytest.mark.processes
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_help(service: type[ServiceSettings], flag: str) -> None:
    """It ends with an example, and loads neither torch nor grpc."""
    code = f"import sys, runpy; sys.argv = ['{service.module}', '{flag}']\n"
    code += f"try: runpy.run_module('{service.module}', run_name='__main__')\n"
    code += "except SystemExit as e: assert e.code == 0\n"
    code += "assert 'torch' not in sys.modules and 'grpc' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == help_text(service, show_all=flag == "--help-all")
    assert done.stdout.endswith(f"\nExample:\n  {service.example}\n")
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_help_all_has_every_setting(service: type[ServiceSettings]) -> None:
    """With its flags, or its key and variable; and its group and default."""
    text = help_text(service, show_all=True)
    words = " ".join(text.split())
    for setting in describe(service):
        for flag in setting.flags:
            assert f"  {flag}" in text or f", {flag}" in text
        if setting.has_flag:
            assert f"\n{setting.group.title}:\n" in text
        else:
            assert f"\n  {setting.key}, {setting.variable}" in text
            assert setting.flag not in text
        assert not setting.default or f"Default: {setting.default_words}." in words


def test_help_has_the_common_settings(service: type[ServiceSettings]) -> None:
    text = help_text(service)
    common = [each for each in describe(service) if each.level is Level.COMMON]
    assert 17 <= len(common) <= 22
    listed = {word.strip(",") for word in re.findall(r"^  (--\S+)", text, re.MULTILINE)}
    assert listed == {setting.flag for setting in common}
    assert all(each in common for each in describe(service) if each.is_required)


def test_a_setting_without_a_flag(
    service: type[ServiceSettings], load: Load, file: Callable[[str], str], monkeypatch
) -> None:
    """A flag that somebody tries names the key and the variable, which both set it."""
    settings = [each for each in describe(service) if not each.has_flag]
    assert settings
    for setting in settings:
        for flag in (setting.flag, f"--no-{setting.key}"):
            with pytest.raises(InvalidSetting) as caught:
                load(f"{flag}=1")
            assert str(caught.value) == (
                f"{flag}: there is no such flag; set {setting.key} in the file that --config "
                f"names, or the variable {setting.variable}"
            )
    numeric = next(each for each in settings if each.metavar == "SECONDS")
    assert getattr(load("--config", file(f"{numeric.key} = 7")), numeric.name) == 7
    monkeypatch.setenv(numeric.variable, "8")
    assert getattr(load(), numeric.name) == 8


@pytest.mark.processes
def test_exit_status(service: type[ServiceSettings]) -> None:
    command = [sys.executable, "-m", service.module, "--listen", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("loadout: --listen: 'nowhere' is not HOST:PORT\n")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:70", ("127.0.0.1", 70)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:9", ("localhost", 9)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["", "h", ":1", "h:", "h:x", "::1:80", "h:65536", "h i:1"])
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        split_address(address)


def test_endpoints() -> None:
    assert check_endpoint("") == ""
    assert check_endpoint("http://h:4317") == "http://h:4317"
    for wrong in ("h:4317", "http://h", "ftp://h:1"):
        with pytest.raises(ValueError, match="is not http"):
            check_endpoint(wrong)


def test_standard_endpoint() -> None:
    http, other = "http://collector:4317", "http://traces:4317"
    plain = {"OTEL_EXPORTER_OTLP_ENDPOINT": http}
    assert standard_endpoint({}) == ""
    assert standard_endpoint(plain) == http
    assert standard_endpoint(plain | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": other}) == other
    assert standard_endpoint(plain | {"OTEL_SDK_DISABLED": "true"}) == ""
    assert standard_endpoint(plain | {"OTEL_TRACES_EXPORTER": "none"}) == ""
    with pytest.raises(InvalidSetting, match="OTEL_EXPORTER_OTLP_PROTOCOL: only grpc"):
        standard_endpoint(plain | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
    with pytest.raises(
        InvalidSetting, match="OTEL_EXPORTER_OTLP_ENDPOINT: 'collector:4317' is not"
    ):
        standard_endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"})


def test_opentelemetry_names_the_endpoint(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    assert load().otlp_endpoint == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://h:4317")
    assert load().otlp_endpoint == "http://h:4317"
    assert load("--otlp-endpoint", "http://h:1").otlp_endpoint == "http://h:1"
