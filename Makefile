# make demo   sets everything up and fine-tunes a real model through four services
# make test   sets everything up and passes the tests
# make help   the rest

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
COOKBOOK := .venv-cookbook
SGLANG := .venv-sglang
WIRE   := services/gateway/tinsmith_gateway/proto
# Each client version that is tried has an environment with nothing but the client in it; what that
# needs besides comes from ours.
CLIENTS := $(foreach version,$(shell cat tests/compat/versions.txt tests/compat/outside.txt),.venv-clients/$(version)/.ready)
# One thread each: spinning OpenMP threads starve the other services on a small machine.
ENV    := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test test-slow test-fault soak test-parity test-gpu test-clients clients-table test-cookbook cookbook test-dashboard test-sglang sglang envs check bench bench-log bench-trainer bench-tenants bench-gateway bench-sampler bench-weights bench-followed bench-checkpoint study-lora help clean proto
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(STAMP) ## train a real model through four services, and see what it learned
	@$(BIN)/tinsmith demo

test: $(STAMP) ## the tests: unit, contract, integration with a real broker and real processes
	@$(ENV) $(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow'

test-slow: $(STAMP) ## those of them that take long
	@$(ENV) $(BIN)/python -m pytest -q -n 2 --dist loadfile -m slow

test-fault: $(STAMP) ## kills of every process at random, and what must survive them
	@$(ENV) $(BIN)/python -m pytest -q tests/fault

soak: $(STAMP) ## many runs under random faults; MINUTES=15 RUNS=100 ARGS="--seed 1"; JSON and table
	@$(ENV) $(BIN)/python -m tests.soak.run --minutes $(or $(MINUTES),15) --runs $(or $(RUNS),100) $(ARGS)

test-parity: $(STAMP) ## whole runs, step by step, against an independent torch+peft script
	@$(ENV) $(BIN)/python -m pytest -q tests/parity

test-gpu: $(STAMP) ## what needs a GPU; skipped where there is none (TINSMITH_TEST_DEVICE=cpu: run there)
	@$(ENV) $(BIN)/python -m pytest -q tests/gpu

test-clients: $(STAMP) $(CLIENTS) ## every method and command of tinker clients 0.18 to 0.38 on one server
	@$(ENV) $(BIN)/python -m pytest -q tests/compat

clients-table: $(STAMP) $(CLIENTS) ## make docs/compatibility.md anew
	@TINSMITH_WRITE_TABLE=1 $(ENV) $(BIN)/python -m pytest -q tests/compat

test-cookbook: $(STAMP) $(COOKBOOK)/.ready ## the cookbook's own recipes, unmodified, on a server here
	@$(ENV) $(BIN)/python -m pytest -q -n 2 --dist loadfile tests/cookbook

cookbook: $(STAMP) $(COOKBOOK)/.ready ## the environment in which 'tinsmith cookbook' runs recipes

test-dashboard: $(STAMP) ## the dashboard's routes, and its page in headless Chromium where there is one
	@$(ENV) $(BIN)/python -m pytest -q tests/unit/gateway/test_dashboard.py tests/integration/test_dashboard.py

test-sglang: $(STAMP) $(SGLANG)/.ready ## the SGLang engine, on a real SGLang server here
	@$(ENV) $(BIN)/python -m pytest -q tests/sglang

sglang: $(SGLANG)/.ready ## the environment that SGLang runs in on a machine without a GPU

envs: $(STAMP) $(CLIENTS) $(COOKBOOK)/.ready $(SGLANG)/.ready ## all that the tests of others' software run in

check: $(STAMP) ## lint, types, import rules, sizes, spelling
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy libs/tinsmith services/gateway/tinsmith_gateway services/trainer/tinsmith_trainer services/sampler/tinsmith_sampler services/checkpointer/tinsmith_checkpointer
	@$(BIN)/lint-imports
	@$(BIN)/python .ci/size_gate.py
	@$(BIN)/codespell

bench: $(STAMP) ## step time through the server against a bare torch+peft loop, as JSON
	@$(ENV) $(BIN)/python -m tests.bench.step

bench-log: $(STAMP) ## what the log costs per step, replay speed, pause of a save, as JSON
	@$(ENV) $(BIN)/python -m tests.bench.log

bench-trainer: $(STAMP) ## the trainer against a bare loop: tokens/s, memory, FLOP/s, as JSON
	@$(ENV) $(BIN)/python -m tests.bench.trainer

bench-tenants: $(STAMP) ## 1 to 8 clients on one trainer: busy share, waits; JSON, table, plot
	@$(ENV) $(BIN)/python -m tests.bench.tenants

bench-gateway: $(STAMP) ## long polls, large requests and promises with 1 and 2 workers, as JSON
	@$(ENV) $(BIN)/python -m tests.bench.gateway

bench-sampler: $(STAMP) ## transformers generate, our engine, SGLang; alone and through the gateway, as JSON
	@$(ENV) $(BIN)/python -m tests.bench.sampler

bench-weights: $(STAMP) ## weight changes: the codec, and publish to active through a broker, as JSON
	@$(ENV) $(BIN)/python -m tests.bench.weights

bench-followed: $(STAMP) $(SGLANG)/.ready ## 200 steps of RL on all weights of a 135M model; both engines follow them: a table and a plot
	@$(ENV) $(BIN)/python -m tests.bench.followed --plot $(CURDIR)/followed.svg

bench-checkpoint: $(STAMP) ## pause and duration of a save, loading, bytes, against torch.save, as JSON
	@$(ENV) $(BIN)/python -m tests.bench.checkpoint

study-lora: $(STAMP) ## best learning rates of adapters by rank, and of all weights; JSON, table, plot
	@$(ENV) $(BIN)/python -m tests.study.lora $(ARGS)

proto: $(STAMP) ## regenerate the client's protobuf messages and docs/protocol.md
	@test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto
	@.venv-proto/bin/python -m pip install --quiet 'grpcio-tools==1.76.*'
	@.venv-proto/bin/python -m grpc_tools.protoc -I $(WIRE) --python_out $(WIRE) --pyi_out $(WIRE) tinsmith_wire.proto
	@$(BIN)/python -m tinsmith.messages.describe > docs/protocol.md

clean: ## remove the environment
	rm -rf $(VENV) .venv-clients $(COOKBOOK) $(SGLANG)

# Runs again only when the requirements change, so that the second time needs no network.
$(STAMP): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,demo,dev]'
	@touch $@

.venv-clients/%/.ready: | $(STAMP)
	@$(PYTHON) -m venv --clear --without-pip $(@D)
	@$(BIN)/python -m pip --python $(@D)/bin/python install --quiet --no-deps tinker==$*
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(@D)/lib/python3*/site-packages)/ours.pth
	@touch $@

# The newest cookbook asks for a package in a version that not every platform has, so its requirements
# are listed instead of resolved. Tinsmith is there for its launcher, which needs nothing else.
$(COOKBOOK)/.ready: deploy/cookbook.txt
	@echo "== setting up $(COOKBOOK) (some minutes the first time)"
	@test -x $(COOKBOOK)/bin/python || $(PYTHON) -m venv $(COOKBOOK)
	@$(COOKBOOK)/bin/python -m pip install --quiet --upgrade pip
	@$(COOKBOOK)/bin/python -m pip install --quiet -r deploy/cookbook.txt
	@$(COOKBOOK)/bin/python -m pip install --quiet --no-deps tinker-cookbook==0.6.1 -e .
	@touch $@

# Without its requirements, which are those of a GPU. pip says that they are missing, and goes on.
$(SGLANG)/.ready: deploy/sglang-cpu.txt
	@echo "== setting up $(SGLANG) (some minutes the first time)"
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python -m pip install --quiet --upgrade pip
	@$(SGLANG)/bin/python -m pip install --quiet torch==2.13.0
	@$(SGLANG)/bin/python -m pip install --quiet --no-deps sglang==0.5.23
	@$(SGLANG)/bin/python -m pip install --quiet -r deploy/sglang-cpu.txt
	@touch $@
