"""The compose file: real settings, pinned images, closed to other machines, scraped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ByteSize, TypeAdapter

from adapter_store.images.tiers.memory_tier import MARGIN_BYTES
from loadout.health.__main__ import parse_arguments
from servicekit.rpc.tls import check_exposure
from tests.deploy import dockerfile
from tests.support.deploy.compose import COMPOSE, CUDA, FOLDER
from tests.support.deploy.images import versions
from tests.support.deploy.manifests import ROOT
from tests.support.deploy.probes import END_SECONDS, LAST_SECONDS, SERVICES
from tests.support.deploy.settings import CLASSES, DEMO_MODEL

SERVICES_OF_OURS = {"adapter-store": "adapter_store", "inference": "inference_svc"}
VARIABLE = re.compile(r"\$\{(\w+)")


@pytest.fixture(params=SERVICES_OF_OURS)
def service(request):
    return COMPOSE["services"][request.param]


def environment_of(name: str) -> dict[str, str]:
    changed = CUDA["services"].get(name, {}).get("environment", {})
    return {**COMPOSE["services"][name]["environment"], **changed}


@pytest.mark.parametrize("name", SERVICES_OF_OURS)
def test_settings_are_real_and_understood(name, monkeypatch, tmp_path):
    module = SERVICES_OF_OURS[name]
    prefix, kind = CLASSES[module]
    environment = environment_of(name)
    for variable in environment:
        assert variable.removeprefix(prefix).lower() in kind.model_fields
    (tmp_path / "config.json").write_text("{}")
    values = dict(COMPOSE["services"][name]["environment"])
    if module == "inference_svc":
        assert values["LOADOUT_INFERENCE_MODEL"] == DEMO_MODEL
        values["LOADOUT_INFERENCE_MODEL"] = str(tmp_path)
    for variable, value in values.items():
        monkeypatch.setenv(variable, value)
    settings = kind()
    assert len(settings.model_fields_set) == len(values)
    check_exposure(settings, listen=settings.listen, http=getattr(settings, "http", ""))
    grace = int(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s"))
    assert grace >= settings.grace_seconds + LAST_SECONDS + END_SECONDS


def test_only_this_machine_gets_in():
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_images_are_pinned_by_variables_that_there_are():
    names = set(VARIABLE.findall((FOLDER / "compose.yaml").read_text()))
    assert names <= versions().keys()
    for name, service in COMPOSE["services"].items():
        if name in SERVICES_OF_OURS:
            assert set(service["build"]["args"]) == versions().keys() & names - {
                each for each in names if each.startswith(("PROMETHEUS", "GRAFANA"))
            }
        else:
            assert re.fullmatch(r"\$\{(\w+)_IMAGE:\?\}@\$\{\1_DIGEST:\?\}", service["image"])


def test_images_are_targets_of_the_dockerfile():
    images = dockerfile.parse(ROOT / "deploy/images/Dockerfile")
    for service in (COMPOSE["services"]["inference"], CUDA["services"]["inference"]):
        target = service["build"]["target"]
        assert target in images.stages
        assert service["image"].startswith(f"loadout-{target}:")
    arguments = set(images.arguments) | {"CPU_TORCH_INDEX"}
    assert set(COMPOSE["services"]["inference"]["build"]["args"]) == arguments


def test_services_have_no_more_rights_than_in_a_cluster(service):
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp"]


@pytest.mark.parametrize("name", SERVICES_OF_OURS)
def test_health_is_what_is_served(name):
    service = COMPOSE["services"][name]
    kind, *command = service["healthcheck"]["test"]
    assert kind == "CMD"
    assert command[:3] == ["python", "-m", "loadout.health"]
    wanted = parse_arguments(command[3:])
    assert wanted.service == SERVICES[SERVICES_OF_OURS[name]]
    [listen] = [v for k, v in service["environment"].items() if k.endswith("E_LISTEN")]
    assert wanted.address.rpartition(":")[2] == listen.rpartition(":")[2]


def test_prometheus_scrapes_both_services():
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    scraped = {
        each["job_name"]: each["static_configs"][0]["targets"] for each in config["scrape_configs"]
    }
    expected = {}
    for name in SERVICES_OF_OURS:
        [address] = [v for k, v in environment_of(name).items() if k.endswith("METRICS_LISTEN")]
        expected[name] = [f"{name}:{address.rpartition(':')[2]}"]
    assert scraped == expected


def test_inference_finds_the_store():
    host, _, port = environment_of("inference")["LOADOUT_INFERENCE_STORE"].partition(":")
    assert environment_of(host)["LOADOUT_STORE_LISTEN"].endswith(f":{port}")


def test_inference_finds_the_stores_socket():
    """On a volume that lasts no longer than its containers, and that one user may enter."""
    socket = environment_of("adapter-store")["LOADOUT_STORE_SHARE_SOCKET"]
    assert environment_of("inference")["LOADOUT_INFERENCE_STORE_SHARE_SOCKET"] == socket
    folder = str(Path(socket).parent)
    assert f"socket:{folder}" in COMPOSE["services"]["adapter-store"]["volumes"]
    assert f"socket:{folder}:ro" in COMPOSE["services"]["inference"]["volumes"]
    options = COMPOSE["volumes"]["socket"]["driver_opts"]
    assert options["type"] == "tmpfs"
    image = dockerfile.parse(ROOT / "deploy/images/Dockerfile").stages["runtime"]
    user, _, group = image.last("USER").partition(":")
    assert {"mode=0700", f"uid={user}", f"gid={group}"} <= set(options["o"].split(","))


def test_the_store_may_lock_its_images():
    store = COMPOSE["services"]["adapter-store"]
    size = TypeAdapter(ByteSize).validate_python(store["environment"]["LOADOUT_STORE_IMAGE_MEMORY"])
    assert store["ulimits"] == {"memlock": size + MARGIN_BYTES}


def test_named_volumes_are_declared():
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source.startswith(".") or source in COMPOSE["volumes"]
    assert (FOLDER / "prometheus.yml").is_file()
