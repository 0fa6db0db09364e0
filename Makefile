# Needs python3.11, pip, make and gcc; everything else goes into .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# What serving needs, and what tests and checks need beside it.
SERVING := $(VENV)/.serving
INSTALLED := $(VENV)/.installed
# For pipes, each part of which may fail.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

# make serve: what is served and how many workers of each kind.
MODEL ?= smollm2-135m-instruct
PREFILL ?= 1
DECODE ?= 1

# make sim: how many seeds.
SEEDS ?= 200

.PHONY: demo serve unit test test-long test-page test-kubernetes test-arm generated check sim gpu bench-cpu images audit scan clean

demo: $(SERVING)
	@$(BIN)/pdserve demo

serve: $(SERVING)
	@$(BIN)/pdserve up $(MODEL) --prefill $(PREFILL) --decode $(DECODE)

# About a minute on two cores: no processes, no large models.
UNIT := $(addprefix tests/,checkpoint cli cpu_kernels engine kvtransfer laboratory measure model perfmodel router security text workers)
unit: $(INSTALLED)
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not slow and not long" $(UNIT)

# Triton's interpreter must be chosen before anything loads Triton, so its tests have processes of their own.
# Files run in their order: clusters in the middle, so that no long file is left to one process at the end.
# Hypothesis gives the same examples each time, so that a run fails by what was changed; make test-long tries others.
INTERPRETED := tests/kernels tests/triton_engine
SAME := --hypothesis-profile=same
test: $(INSTALLED)
	$(BIN)/pytest -q -n 2 --dist loadfile $(SAME) -m "not long" $(INTERPRETED)
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(SAME) -m "not long" $(addprefix --ignore=,$(INTERPRETED))

# More moments of killing, freezing and cutting on live clusters, more models and traces, and other examples of Hypothesis,
# than each run needs.
test-long: $(INSTALLED)
	$(BIN)/pytest -q -m "long or hypothesis" $(INTERPRETED)
	$(BIN)/pytest -q -m "long or hypothesis" $(addprefix --ignore=,$(INTERPRETED))

# The live page in headless Chromium, over a cluster of its own; renews the pictures of docs/page.md.
test-page: $(INSTALLED)
	@command -v chromium >/dev/null || { echo "a browser is needed: apt-get install chromium" >&2; exit 1; }
	$(call install,$(VENV),a browser's driver,-c constraints.txt -e ".[page]")
	mkdir -p docs/images
	PDSERVE_PICTURES=docs/images $(BIN)/pytest -q tests/cluster/browse_live_page.py

# Other people's clients against live clusters, from an environment of their own: about a quarter of an hour.
CLIENTS := build/clients
FUZZING_S ?= 300
# Coding agents for terminals, where npm is there.
AGENTS := @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197
test-clients: $(INSTALLED) $(CLIENTS)/.installed
	PDSERVE_CLIENTS="$(CURDIR)/$(CLIENTS)/bin" PDSERVE_FUZZING_S=$(FUZZING_S) \
		$(BIN)/pytest -q tests/clients tests/cluster/test_openai.py tests/cluster/test_live_structured.py
$(CLIENTS)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(CLIENTS)
	@$(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['clients'], sep='\n')" > $(CLIENTS)/requirements.txt
	$(call install,$(CLIENTS),other people's clients,-r $(CLIENTS)/requirements.txt)
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(CLIENTS) $(AGENTS) \
		&& node $(CLIENTS)/node_modules/@anthropic-ai/claude-code/install.cjs; fi
	@touch $@

# tests/kubernetes on a real API server, which KUBECONFIG names with an administrator's account.
# Python has warned there of connections that were collected unclosed, their transports or sockets: no test fails by it.
test-kubernetes: $(INSTALLED)
	PDSERVE_TEST_KUBECONFIG="$${KUBECONFIG:?names an API server}" \
		$(BIN)/pytest -q -W "ignore:unclosed transport <:ResourceWarning" \
			-W "ignore:unclosed <socket.socket:ResourceWarning" tests/kubernetes

# The CPU kernels on aarch64 processors that qemu emulates; says which Debian packages it needs.
test-arm: $(INSTALLED)
	tests/arm/run_arm.sh

# What is made of other files and checked in: stubs of the protos, the chart's schema, the definition and the schema of policies.
generated: $(INSTALLED)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python proto/generate.py
	$(BIN)/python deploy/helm/schema/values_schema.py
	$(BIN)/python deploy/helm/schema/policy_definition.py
	$(BIN)/pdserve autoscale schema > deploy/policies/schema.json

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/buf lint
	$(BIN)/hadolint deploy/images/Dockerfile
	$(BIN)/pytest -q tests/test_proto_drift.py

# Simulated clusters with faults: seeds 0 to SEEDS-1.
sim: $(INSTALLED)
	PYTHONPATH=tests/simulator $(BIN)/python -m faultsim --seeds $(SEEDS)

# Runs on a machine with a GPU, with its own torch and triton: nothing is installed. `make gpu DRY=1` walks through the same
# sections with tiny shapes on a CPU. GPU_FLAGS are the program's: --only, --seconds, --all.
GPU_FLAGS ?=
ifdef DRY
gpu: $(INSTALLED)
	$(BIN)/python tests/gpu/run_gpu.py --dry $(GPU_FLAGS)
else
gpu:
	python3 tests/gpu/run_gpu.py $(GPU_FLAGS)
endif

# Compares with another engine on this machine: PEER is a folder with vLLM's, or llama.cpp's, virtual environment.
bench-cpu: $(SERVING)
	$(BIN)/python tests/bench_cpu/run_bench_cpu.py --peer "$${PEER:?names the folder of another engine}" $(BENCH_FLAGS)

# Needs a container runtime. Beside each image comes its bill of materials (CycloneDX). IMAGES may name some of them;
# BUILD_FLAGS are the runtime's own, as for another source of the base image or of packages.
DOCKER ?= docker
IMAGES ?= router worker-cpu worker-cuda
BUILD_FLAGS ?=
images: $(addprefix build/images/,$(addsuffix .cdx.json,$(IMAGES)))
build/images/%.cdx.json: FORCE
	mkdir -p build/images
	$(DOCKER) build $(BUILD_FLAGS) -f deploy/images/Dockerfile --target $* -t pdserve-$* .
	$(DOCKER) run --rm --entrypoint cat pdserve-$* /opt/pdserve/sbom.cdx.json > $@
FORCE:

# Asks PyPI for known vulnerabilities of everything that is pinned. Fails where a package cannot be asked about, as at a mirror.
audit:
	@$(PYTHON) -m venv build/audit
	$(call install,build/audit,pip-audit,pip-audit==2.10.1)
	build/audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt
	build/audit/bin/pip-audit --strict --no-deps --disable-pip -r deploy/images/constraints-cuda.txt

# Policies for what the chart renders. Left out: limits of processor time, which only slow processes down (11), what the
# operator's values say (digests 43, pull policy 15), the operator's token (38), IPC_LOCK for RDMA (25), and of the pod that
# tests its probes (8, 9) and its key in a variable (35).
scan: $(INSTALLED)
	@$(PYTHON) -m venv build/scan
	$(call install,build/scan,checkov,checkov==3.3.30)
	$(BIN)/helm template chat deploy/helm/pdserve --namespace llm --values deploy/helm/pdserve/values/several-nodes.yaml > build/scan.yaml
	build/scan/bin/checkov --file build/scan.yaml --framework kubernetes --compact --quiet --skip-download \
		--skip-check CKV_K8S_11,CKV_K8S_43,CKV_K8S_15,CKV_K8S_38,CKV_K8S_25,CKV_K8S_8,CKV_K8S_9,CKV_K8S_35

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

# $(call install,ENVIRONMENT,WHAT,ARGUMENTS): a line a step on the screen. All that pip says is in a log, which an error names.
# Not compiled: that takes pip a minute for all modules, of which most are never imported; the others are compiled then, once.
define install
@echo "fetching $(2): may take minutes, and is logged in $(1)/install.log"
@$(1)/bin/pip install --disable-pip-version-check --no-compile $(3) 2>&1 | tee $(1)/install.log \
	| sed -un "s/^Installing collected packages.*/installing $(2)/p" \
	|| { tail -n 20 $(1)/install.log >&2; echo "pip could not install $(2): see $(1)/install.log" >&2; exit 1; }
endef
unexport PYTHONDONTWRITEBYTECODE
$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

# Pinned: a loose torch would bring gigabytes of CUDA to a machine without a GPU.
$(SERVING): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,$(VENV),what serving needs,-c constraints.txt -e ".[worker]")
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(call install,$(VENV),what tests need,-c constraints.txt -e ".[dev]")
	@touch $@ $(SERVING)
