"""The Dockerfile: pinned, small, unprivileged, and of paths that there are."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

from tests.deploy import dockerfile
from tests.support.deploy.images import FOLDER, versions
from tests.support.deploy.manifests import ROOT, all_workloads
from tools.pages import sbom_docs

pytestmark = pytest.mark.processes  # kubectl builds what they read

IMAGES = dockerfile.parse(FOLDER / "Dockerfile")
TARGETS = ("cpu", "cuda")
TOOLS = ("apt-get", "apt ", "apk ", "g++", "gcc", "clang", "cmake", "build-essential", "pip ")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def ignores(path: str) -> bool:
    """Whether .dockerignore keeps a path out of the build; the last rule that is for it counts."""
    ignored = False
    for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        prefixes = [path, *(str(parent) for parent in (ROOT / path).relative_to(ROOT).parents)]
        is_deep = line.startswith("**/")
        names = [os.path.basename(each) for each in prefixes] if is_deep else prefixes
        if any(fnmatch.fnmatch(name, pattern) for name in names if name not in ("", ".")):
            ignored = not line.startswith("!")
    return ignored


def test_images_are_built_upon_digests():
    pinned = versions()
    for name, stage in IMAGES.stages.items():
        if stage.base not in IMAGES.stages:
            assert stage.base == "${PYTHON_IMAGE}@${PYTHON_DIGEST}", name
    assert not any(IMAGES.arguments.values()), "versions.env says it, and nobody else"
    inner = {arg for stage in IMAGES.stages.values() for arg in stage.all("ARG") if "=" not in arg}
    assert {*IMAGES.arguments, *inner} <= pinned.keys()


def test_versions_are_exact():
    for name, value in versions().items():
        if name.endswith("_DIGEST"):
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", value), name
            image = versions()[name.replace("_DIGEST", "_IMAGE")]
            assert re.search(r":v?\d+\.\d+\.\d+", image), "a tag that says what it is"
    assert not re.search(r"\blatest\b", (FOLDER / "Dockerfile").read_text())


def test_the_python_is_one_that_we_test():
    assert versions()["PYTHON_IMAGE"].startswith(f"python:3.{sys.version_info.minor}.")
    assert PYPROJECT["project"]["requires-python"] == ">=3.11"


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_that_builds_is_in_what_runs(target):
    names = [stage.name for stage in IMAGES.chain(target)]
    assert names == [target, "runtime", "python"]
    for stage in IMAGES.chain(target):
        for command in stage.all("RUN"):
            assert not [tool for tool in TOOLS if tool in command], command
        assert not stage.all("ADD")
    # The check can fail: the compiler is in the other stages.
    assert any("g++" in command for command in IMAGES.stages["toolchain"].all("RUN"))


@pytest.mark.parametrize("target", TARGETS)
def test_only_the_environment_is_taken_over(target):
    copies = [copy for stage in IMAGES.chain(target) for copy in stage.copies]
    taken = [
        (f"installed-{target}", ["/opt/loadout"], "/opt/loadout"),
        (f"sbom-{target}", ["/build/sbom.cdx.json"], "/opt/loadout/sbom.cdx.json"),
    ]
    others = [sources for stage, sources, _ in copies if (stage, sources, _) not in taken]
    assert len(copies) - len(others) == len(taken)
    assert others in ([], [["deploy/images/with-triton-cache.sh"]])


@pytest.mark.parametrize("target", TARGETS)
def test_nobody_is_root(target):
    users = [user for stage in IMAGES.chain(target) for user in stage.all("USER")]
    assert users == ["65532:65532"], "a number: Kubernetes cannot tell from a name"


@pytest.mark.parametrize("target", TARGETS)
def test_ports_are_those_of_the_pods(target):
    exposed = {int(port) for port in IMAGES.stages["runtime"].last("EXPOSE").split()}
    ports = {port for _, each in all_workloads() for port in each.ports.values()}
    assert exposed == ports | {8000}, "the last one is of the component http"


def test_pods_run_images_of_this_version():
    tag = PYPROJECT["project"]["version"]
    for _, workload in all_workloads():
        images = {each["image"] for each in workload.all_containers}
        assert len(images) == 1, "the overlay's, for both"
        assert images <= {f"loadout-{target}:{tag}" for target in TARGETS}
    assert f"VERSION={tag}" in IMAGES.stages["runtime"].all("ARG")


def test_what_is_copied_is_there_and_not_ignored():
    for stage in IMAGES.stages.values():
        for source_stage, sources, _ in stage.copies:
            if source_stage:
                assert source_stage in IMAGES.stages
                continue
            for source in sources:
                assert (ROOT / source).exists(), source
                assert not ignores(source), source


@pytest.mark.parametrize(
    "path", [".venv", "tests/support/native.py", "kernels/native/lib/avx2-0.so", "loadout/x_pb2.py"]
)
def test_what_is_not_copied_is_ignored(path):
    assert ignores(path)


def test_the_wheel_is_built_of_all_that_it_needs():
    stages = IMAGES.chain("wheel")
    copied = {source for each in stages for _, sources, _ in each.copies for source in sources}
    packages = {
        each.rstrip("*") for each in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    project = PYPROJECT["project"]
    assert packages | {"protos", "pyproject.toml", "setup.py"} <= copied
    assert {project["readme"], *project["license-files"]} <= copied


RUNS = " ".join(IMAGES.stages["toolchain"].all("RUN"))


@pytest.mark.parametrize("image", sbom_docs.EXTRAS)
def test_requirements_are_the_projects(image):
    """Those of SBOMs in the documentation, too."""
    extras = sbom_docs.EXTRAS[image]
    assert f"requirements.py {' '.join(extras)} > {image.removeprefix('loadout-')}.txt" in RUNS
    command = [sys.executable, ROOT / "tools/packaging/requirements.py", *extras]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = {re.split(r"[\[<>=]", line)[0] for line in done.stdout.splitlines()}
    assert {"torch", "grpcio", "psycopg", "opentelemetry-sdk"} <= names
    assert ("triton" in names) == ("gpu" in extras)


def test_every_installation_checks_hashes():
    """But that of our own wheel, which has just been built, without what it depends on."""
    hashed = "--require-hashes --constraint constraints.txt"
    assert IMAGES.environment("sbom")["HASHED"] == hashed
    installed = [
        command.strip()
        for stage in IMAGES.stages.values()
        for run in stage.all("RUN")
        for command in run.split("&&")
        if "pip install" in command
    ]
    assert len(installed) == 8
    for command in installed:
        assert (
            "${HASHED}" in command
            or "--require-hashes --requirement pip.txt" in command
            or re.search(r"--no-deps /opt/wheels/loadout-\*\.whl$", command)
        ), command
    assert "pip wheel --no-deps --no-build-isolation" in " ".join(IMAGES.stages["wheel"].all("RUN"))


@pytest.mark.parametrize("target", TARGETS)
def test_the_sbom_is_of_all_that_is_installed(target):
    """Every report of pip's lies where the SBOM's stage takes them from."""
    installed = " ".join(IMAGES.stages[f"installed-{target}"].all("RUN"))
    assert installed.count("pip install") == len(re.findall(r"--report \w+\.json", installed))
    stage = IMAGES.stages[f"sbom-{target}"]
    assert stage.copies == [(f"installed-{target}", ["/build/*.json"], "./")]
    assert f"sbom.py loadout-{target} --report *.json" in stage.last("RUN")


def test_no_program_changes_its_user_and_none_installs():
    run = IMAGES.stages["runtime"].last("RUN")
    assert "find / -xdev -type f -perm /6000 -exec chmod a-s {} +" in run
    assert "ensurepip" in run


def test_tritons_modules_are_copied_to_where_it_may_write(tmp_path):
    seed, cache = tmp_path / "seed", tmp_path / "cache"
    (seed / "key").mkdir(parents=True)
    (seed / "key" / "launcher.so").write_text("prebuilt")
    cache.mkdir()
    (cache / "kernel.cubin").write_text("compiled here")
    environment = {**os.environ, "TRITON_SEED_DIR": str(seed), "TRITON_CACHE_DIR": str(cache)}
    command = ["sh", FOLDER / "with-triton-cache.sh", "printenv", "TRITON_CACHE_DIR"]
    for _ in range(2):  # a container that starts again finds it as it left it
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(cache)
    assert (cache / "key" / "launcher.so").read_text() == "prebuilt"
    assert (cache / "kernel.cubin").read_text() == "compiled here"
    assert IMAGES.environment("cuda")["TRITON_SEED_DIR"] in " ".join(
        IMAGES.stages["installed-cuda"].all("RUN")
    )


def test_make_builds_what_is_pinned():
    done = subprocess.run(
        ["make", "--dry-run", "images"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    commands = [line for line in done.stdout.splitlines() if line.startswith("docker build")]
    assert [line.partition("--target ")[2].split()[0] for line in commands] == list(TARGETS)
    tag = PYPROJECT["project"]["version"]
    for target, command in zip(TARGETS, commands, strict=True):
        for name in (*IMAGES.arguments, "CPU_TORCH_INDEX"):
            assert f"--build-arg {name}={versions()[name]}" in command
        assert f"--tag loadout-{target}:{tag} ." in command


def test_entry_points_take_a_command():
    assert json.loads(IMAGES.stages["cuda"].last("ENTRYPOINT")) == ["with-triton-cache"]
    assert not IMAGES.stages["cpu"].all("ENTRYPOINT")
