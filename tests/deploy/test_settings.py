"""What pods are told is what the services understand: variables, values, flags, files."""

from __future__ import annotations

from inference_svc.config import split_hub_name
from loadout.health.__main__ import parse_arguments
from servicekit.rpc.tls import check_exposure
from tests.support.deploy.manifests import ROOT, Workload, gibibytes
from tests.support.deploy.settings import CLASSES, DEMO_MODEL

GIB = 1 << 30
OF_LIBRARIES = {"HF_HOME", "HF_TOKEN_PATH", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME"}
"""Variables of the hub's library, and of NCCL."""


def test_every_variable_is_a_setting(workload):
    prefix, kind = CLASSES[workload.module]
    names = {*workload.environment, *workload.secret_variables} - OF_LIBRARIES
    assert names
    for name in names:
        assert name.startswith(prefix)
        assert name.removeprefix(prefix).lower() in kind.model_fields


def test_every_value_is_understood(workload, settings):
    prefix, _ = CLASSES[workload.module]
    names = {*workload.environment, *workload.secret_variables} - OF_LIBRARIES
    given = {name.removeprefix(prefix).lower() for name in names}
    assert settings.model_fields_set == given


def test_nobody_is_let_in_unasked(workload, settings):
    """The service itself refuses to start otherwise."""
    check_exposure(settings, listen=settings.listen, http=getattr(settings, "http", ""))
    is_open = settings.allow_open_access
    assert is_open == (settings.policy_file is None)
    assert is_open == (workload.object["metadata"]["namespace"] == "loadout-dev")


def test_a_token_travels_only_under_tls(workload, settings):
    if settings.policy_file is not None:
        assert settings.tls_cert_file is not None
        assert settings.tls_key_file is not None
    if workload.module == "inference_svc" and settings.store_token_file is not None:
        assert settings.store_tls_ca_file is not None
        assert not settings.store_allow_insecure_token


def test_files_lie_on_what_is_mounted(workload, settings):
    for name, value in settings:
        if name.endswith("_file") and value is not None:
            volume = workload.mount_of(str(value))
            assert "secret" in volume
            assert volume["mount"]["readOnly"] is True
            assert "subPath" not in volume["mount"], "a renewed Secret would not be seen"
            assert volume["secret"]["defaultMode"] == 0o440


def test_the_model_is_in_the_image_or_on_a_volume(workload):
    if workload.module == "inference_svc":
        model = workload.environment["LOADOUT_INFERENCE_MODEL"]
        if workload.init_containers:
            assert split_hub_name(model)
        elif model != DEMO_MODEL:
            assert workload.mount_of(model)["mount"]["readOnly"] is True
        assert "/opt/loadout/demo" in (ROOT / "deploy/images/finish.sh").read_text()
        assert (ROOT / "loadout/demo/assets/model/config.json").is_file()


def test_commands_are_modules_of_ours(workload):
    assert workload.container["args"] == ["python", "-m", workload.module]
    assert "command" not in workload.container, "the image's entry point stays"
    assert (ROOT / workload.module / "__main__.py").is_file()


def test_flags_of_probes_are_real(workload):
    for probe in workload.probes.values():
        if "exec" in probe:
            command = probe["exec"]["command"]
            assert command[:3] == ["python", "-m", "loadout.health"]
            parse_arguments(command[3:])  # ends the test where it does not understand


def test_tiers_fit_what_the_pod_has(workload, settings):
    memory = gibibytes(workload.container["resources"]["limits"]["memory"])
    if workload.module == "inference_svc":
        host_memory = settings.host_memory or 0
        assert host_memory / GIB <= 0.5 * memory, "the model passes through the rest"
        return
    assert settings.image_memory / GIB <= 0.7 * memory
    kept = (settings.disk_cache_bytes + settings.fetched_bytes) / GIB
    assert kept <= 0.9 * data_gibibytes(workload)


def data_gibibytes(workload: Workload) -> float:
    """What the store's folder may hold, on a volume or beside the container."""
    volume = workload.mount_of(workload.environment["LOADOUT_STORE_DATA_DIR"])
    if "claim" in volume:
        return gibibytes(volume["claim"]["resources"]["requests"]["storage"])
    size = gibibytes(volume["emptyDir"]["sizeLimit"])
    assert size <= gibibytes(workload.container["resources"]["requests"]["ephemeral-storage"])
    return size


def test_replicas_share_a_catalog_and_a_bucket(workload, settings):
    if workload.module == "adapter_store":
        is_alone = workload.spec.get("replicas", 2) == 1
        assert is_alone == (settings.catalog_dsn is None)
        assert is_alone == (settings.shared_s3 == "")
