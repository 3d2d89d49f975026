"""Commands of the pages that other tests run, with the test that does."""

from __future__ import annotations

from typing import NamedTuple


class Elsewhere(NamedTuple):
    """Commands that test_commands.py does not run, by a pattern of `str(Command)`; the test that
    runs them, and a text in it that shows so. `why`: the reason for another form of the command
    there; "" if it is the same."""

    pattern: str
    place: str
    text: str
    why: str = ""


BY_CI = "a checkout of its own; CI begins with it"
ELSEWHERE = (
    Elsewhere(
        r"README.md: make demo", "tests/loadout/demo/test_demo.py", '*program, "demo", *flags'
    ),
    Elsewhere(r"README.md: make chat", "tests/system/test_smollm2.py", '"demo", "--chat"'),
    Elsewhere(
        r"examples/smollm2/README.md: python examples/smollm2/train.py .*",
        "tests/system/test_smollm2.py",
        'ROOT / "examples" / "smollm2" / "train.py"',
        "fewer steps",
    ),
    Elsewhere(
        r"examples/smollm2/README.md: loadout demo --chat .*",
        "tests/system/test_smollm2.py",
        '"demo", "--chat"',
        "the adapters of the repository",
    ),
    Elsewhere(r"CONTRIBUTING.md: (git|cd|make) .*", ".ci/run", "make check", BY_CI),
    Elsewhere(
        r"docs/installation.md: make wheel", "tests/tools/test_wheel.py", '"tools.packaging.wheel"'
    ),
    Elsewhere(
        r"docs/installation.md: pip install .*",
        "tests/tools/test_wheel.py",
        '"install", "--no-deps"',
        "a network",
    ),
    Elsewhere(r"docs/installation.md: loadout demo", "tests/tools/test_wheel.py", '"demo", "--req'),
    Elsewhere(
        r"docs/engines.md: pip install .*",
        "Makefile",
        "pip install --quiet ./integrations/vllm",
        "a network; the other package is installed in the same way",
    ),
    Elsewhere(
        r"docs/engines.md: export .*",
        "tests/integrations/test_sglang.py",
        '"LOADOUT_STORE": store',
        "variables of one process",
    ),
    Elsewhere(
        r"docs/engines.md: vllm serve .*",
        "tests/integrations/test_real_vllm.py",
        '"vllm.entrypoints.openai.api_server"',
        "the module of this command, for `make test-vllm`",
    ),
    Elsewhere(
        r"docs/engines.md: python -m loadout_sglang .*",
        "tests/integrations/test_sglang.py",
        '"-m", "loadout_sglang"',
        "a store and an engine of its own",
    ),
    Elsewhere(
        r"docs/engines.md: curl .*",
        "tests/integrations/test_sglang.py",
        '}/adapters"',
        "Python in place of curl",
    ),
    Elsewhere(
        r"docs/supply-chain.md: pip install .*",
        "tests/tools/test_constraints.py",
        "*install.hashed(project / CONSTRAINTS)",
        "a network",
    ),
    Elsewhere(
        r"docs/supply-chain.md: make constraints.*",
        "tests/tools/test_constraints.py",
        'constraints.current(project, ["c"])',
        "package indexes",
    ),
    Elsewhere(
        r"docs/supply-chain.md: make audit",
        "tests/tools/test_audit.py",
        "audit.main(",
        "a service of advisories",
    ),
    Elsewhere(
        r"docs/supply-chain.md: docker run .*",
        "tests/containers/test_images.py",
        'image, "cat", SBOM',
        "docker",
    ),
    Elsewhere(r"docs/cli.md: loadout bench .*", "tests/system/test_bench_command.py", '"bench", *'),
    Elsewhere(
        r"docs/kubernetes.md: (umask|printf|kubectl .* create secret) .*",
        "tests/deploy/test_docs.py",
        "def test_the_steps_make_the_secrets",
    ),
    Elsewhere(
        r"docs/kubernetes.md: mkdir .*",
        "tests/deploy/test_docs.py",
        "def test_a_nodes_folder_is_the_volumes",
        "a node",
    ),
    Elsewhere(
        r"docs/kubernetes.md: (kubectl|curl) .*",
        "tests/deploy/test_docs.py",
        "def test_commands_name_what_the_cluster_will_have",
        "a cluster",
    ),
    Elsewhere(
        r"docs/kubernetes.md: (make images|kind .*)",
        "tests/deploy/test_docs.py",
        "def test_the_clusters_of_kind_get_the_image_that_dev_runs",
        "docker and kind",
    ),
    Elsewhere(
        r"docs/adapters.md: loadout convert .*",
        "tests/loadout/cli/test_convert.py",
        'run("convert", str(trained), str(out), "--initial"',
        "an adapter that was trained on a changed base",
    ),
    Elsewhere(
        r"docs/security.md: (umask|openssl|export|loadout (token|store|serve|adapters)) ?.*",
        "tests/docs/test_secured_setup.py",
        "def test_the_steps_secure_both_services",
    ),
    Elsewhere(
        r"docs/operations/ranks.md: (export|loadout serve .* --nnodes) .*",
        "tests/system/nodes.py",
        '"--nnodes", "2"',
        "addresses of one machine",
    ),
    Elsewhere(
        r"docs/operations/ranks.md: loadout serve .* --tensor-parallel 2",
        "tests/system/test_ranks.py",
        '"--tensor-parallel"',
        "a small model",
    ),
    Elsewhere(
        r"docs/security.md: loadout register .*",
        "tests/loadout/cli/test_register.py",
        "def test_register_with_a_signature",
        "a store that trusts the key",
    ),
    Elsewhere(
        r"docs/development/add-an-architecture.md: python -m pytest .*inference_svc.*",
        "tests/support/models/families.py",
        '"exaone4": (',
    ),
    Elsewhere(
        r"docs/development/add-an-architecture.md: python -m pytest .*system.*",
        "tests/support/models/zoo.py",
        '"exaone4": (',
    ),
    Elsewhere(
        r"docs/development/gpu-run.md: make gpu-pack",
        "tests/bench/test_gpu_run.py",
        "pack.make(folder",
        "a network",
    ),
    Elsewhere(
        r"docs/development/gpu-run.md: tools/gpu_run.sh .*",
        "tests/bench/test_gpu_run.py",
        '"--emulate"',
        "a GPU",
    ),
    Elsewhere(
        r"docs/operations/backup.md: .*",
        "tests/adapter_store/service/test_backup_drills.py",
        "backup.md",
    ),
    Elsewhere(
        r"docs/observability/alerts.md: sed .*",
        "tests/deploy/test_runbook_links.py",
        "runbook files",
    ),
    Elsewhere(
        r"deploy/README.md: make images",
        "tests/deploy/test_images.py",
        "def test_make_builds_what_is_pinned",
        "docker",
    ),
    Elsewhere(
        r"deploy/README.md: docker compose .*",
        "tests/deploy/test_compose.py",
        "def test_settings_are_real_and_understood",
        "docker",
    ),
    Elsewhere(
        r"examples/node/README.md: npm .*",
        "tests/loadout/test_node_example.py",
        '"npm", "ci"',
        "a registry",
    ),
    Elsewhere(
        r"examples/node/README.md: node .*",
        "tests/loadout/test_node_example.py",
        "def test_streams_a_generation",
    ),
    Elsewhere(
        r"examples/rl/README.md: (loadout up|python .*)",
        "tests/system/test_rl_example.py",
        "forks.run(str(EXAMPLE), *arguments",
    ),
    Elsewhere(
        r"examples/python/README.md: python .*",
        "tests/system/test_python_examples.py",
        "generate.py",
    ),
    Elsewhere(
        r"examples/python/README.md: loadout up .*", "tests/loadout/demo/test_demo.py", '"--http"'
    ),
)
