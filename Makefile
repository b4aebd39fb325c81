# Every target sets up .venv by itself; the second time that takes no time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
TRACKERS := $(VENV)/.trackers
DOCS := $(VENV)/.docs
FLOWER := .venv-flower
KILLS ?= 12
JOBS ?= auto

# How older processors compute: other bits, and the same results within what tests and pages allow
LOWEST := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
NUMBERS := tests/methods tests/client tests/models tests/theory tests/docs tests/data/test_augment.py tests/data/test_problems.py \
	tests/config/test_validation_set.py tests/config/test_warmup.py tests/config/test_lr_schedule.py tests/utils/test_compat.py tests/utils/test_devices.py \
	tests/server/test_simulation.py $(patsubst %,tests/runs/test_%.py,diagnosis inspect replay) \
	$(patsubst %,tests/behaviour/test_%.py,before_move format traps) tests/project/test_readme.py \
	$(patsubst %,tests/reproduce/test_%.py,results_version reproduction_page)

.DEFAULT_GOAL := help
.PHONY: help setup demo smoke test test-all test-lowered test-flower soak bench gpu-check profile notebooks check format wheel clean

help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv and install the package with its pinned dependencies

# what a run needs, and no tool of developers; pip shows what it downloads
$(RUNTIME): pyproject.toml constraints.txt fedspeed/models/kernels.c
	@$(PYTHON) -c 'import sys; sys.exit("fedspeed needs Python 3.11 or newer, found " + sys.version.split()[0] + "; run make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing PyTorch and six other packages into $(VENV): one to three minutes, once"
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(STAMP): $(RUNTIME)
	@echo "installing what the tests and checks need"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# 1 GB; timm is left out: the torchvision it needs must be built for the same device as torch, and breaks transformers
# if it is not
$(TRACKERS): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,tensorboard,wandb,mlflow,pandas,lora,transformers,optuna,ray,notebooks]'
	touch $@

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,docs]'
	touch $@

demo: $(RUNTIME) ## compare FedAvg and FedSpeed on digits: a table, a chart, a report page (a minute after the installation)
	$(BIN)/fedspeed compare fedavg fedspeed --data digits --split dirichlet:0.3 --clients 50 --active 5 \
		--rounds 60 --batch-size 10 --seeds 3 --out runs/demo --overwrite
	$(BIN)/fedspeed report runs/demo -o runs/demo/report.html

test: setup ## the tests (under 10 minutes on two cores)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

smoke: setup ## what a change breaks first: contract, transcription, results, stored runs, resume (about a minute)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m 'smoke and not slow'

# the second command: what every tutorial prints
test-lowered: setup ## the tests as older processors compute: all with SSE4.2, those that compare numbers with AVX2
	$(LOWEST) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile
	$(LOWEST) $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m slow tests/docs/test_tutorials.py
	$(AVX2) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(NUMBERS)

# flwr wants other versions of some packages than the trackers, so it has an environment of its own; the second step
# installs what is listed as it is listed
$(FLOWER)/.installed: pyproject.toml constraints-flower.txt
	test -x $(FLOWER)/bin/python || $(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --quiet -c constraints-flower.txt -e '.[dev]'
	$(FLOWER)/bin/python -m pip install --quiet --no-deps -r constraints-flower.txt
	touch $@

test-flower: $(FLOWER)/.installed ## the tests of deployment: the protocol, then a real Flower federation on loopback
	$(FLOWER)/bin/python -m pytest tests/flower -m 'slow or not slow' -n 2 --dist loadfile

test-all: test test-lowered test-flower $(TRACKERS) $(DOCS) ## the tests, then the slow ones: real data, many processes, trackers (under 60 minutes)
	$(BIN)/python -m pytest -m slow -n $(JOBS) --dist loadgroup

bench: setup ## time against bare PyTorch loops; QUICK=1: in 5 minutes; PEERS=1: other simulators too; FULL_MEMORY=1
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(if $(PEERS),--peers) $(if $(FULL_MEMORY),--full-memory) $(ARGS)

gpu-check: setup ## try a GPU in five minutes: a report to send to us; DEVICE=cuda:1 for another; exit code 3: there is none
	@$(BIN)/python -m benchmarks.gpu_check $(if $(DEVICE),--device $(DEVICE)) $(ARGS)

profile: setup ## where each millisecond of a client's turn goes, beside the machine's limits
	$(BIN)/python -m benchmarks.profile $(ARGS)

notebooks: setup ## the tutorials as notebooks, in build/notebooks
	$(BIN)/python docs/_ext/notebooks.py docs/tutorials build/notebooks

soak: setup ## kill -9 a few hundred times, crash at every file operation, fuzz longer (about an hour; KILLS=12)
	FEDSPEED_KILLS=$(KILLS) FEDSPEED_FUZZ=10 $(BIN)/python -m pytest -m 'slow or not slow' tests/behaviour/test_resume.py \
		tests/behaviour/test_crash_points.py tests/runs/test_verify.py tests/behaviour/test_format.py tests/behaviour/test_fuzz.py

check: setup ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## let ruff put the format right
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: setup ## build the source distribution, and from it the wheel, into dist/
	rm -rf dist build
	$(BIN)/python -m build --outdir dist

.PHONY: docs
docs: $(DOCS) ## build the documentation site, docs/_build/html, without a network; a warning is an error
	$(BIN)/python docs/build.py

clean: ## remove what can be made again
	rm -rf build dist runs docs/_build .pytest_cache .ruff_cache .mypy_cache .hypothesis
