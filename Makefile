# The commands of the project. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PAGE ?=
FLAGS ?=
LINE ?=
ONLY ?=
QUICK ?=
MUSEUM ?=
JOBS ?= 2
TORCH ?= torch
CUDA_VENV := .venv-cuda
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check -c constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true  # On all cores, as pip cannot; some files are templates
HOUSE := settings.ini constraints.txt setup.py pyproject.toml
PACKAGE := $(shell find llm_workbook -type f -not -path '*/__pycache__/*')
PAGES := $(shell find nbs -type f -not -path '*/.*' -not -path '*/runs/*')

# Nothing needs a network once it is installed; `make test HF_HUB_OFFLINE=0 FLAGS=net` lifts that on purpose.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow test-fault test-workbook test-cluster cuda-environment test-cuda-wheel museum mutants cluster-up cluster-down book lab bench bench-gpu docs dist readme stub dashboard hooks clean distclean
.DELETE_ON_ERROR:

help: ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'
	@echo
	@echo "  PYTHON=python3.12    the Python a new $(VENV) is made with (3.11 to 3.14)"
	@echo "  TORCH_INDEX=URL      where torch comes from, at the first installation; empty: as pip is configured"

quickstart: runs/quickstart/quickstart.ipynb ## Fine-tune the tiny model, sharded over two processes
	@$(BIN)/python tools/page.py result $<

runs/quickstart/quickstart.ipynb: nbs/book/00_quickstart.ipynb $(VENV)/.run $(PACKAGE)
	@$(BIN)/python tools/page.py run $< $@

test: $(VENV)/.dev $(VENV)/.compiler ## Check the export, run every page and test that is not long, build the package
	@FLAGS="$(FLAGS)" $(BIN)/python tools/suite.py

test-fault: $(VENV)/.dev $(VENV)/.compiler ## Break 25 things on purpose, on real ranks, and see that no work is lost
	@$(BIN)/python tools/suite.py faults

test-slow: $(VENV)/.dev $(VENV)/.compiler ## Run the long pages and slow tests that `make test` leaves out
	@$(BIN)/python tools/suite.py slow

test-workbook: $(VENV)/.dev $(VENV)/.compiler ## Run the quickstart, the book and the answers, and cheat on every exercise
	@$(BIN)/python tools/suite.py workbook

test-cluster: $(VENV)/.dev $(VENV)/.compiler ## Train, preempt, cut and resume on a real SLURM of two nodes (needs root and slurm-wlm)
	@$(BIN)/python tools/suite.py cluster

# `===` asks for this very name: an index may also have a build for CPUs, whose name says so, and pip would prefer it.
# Few of its modules are ever imported, so none is compiled before.
cuda-environment:
	@$(MAKE) --no-print-directory VENV=$(CUDA_VENV) COMPILE=: TORCH="$$(sed -n 's/^\(torch\)==/\1===/p' constraints.txt)" $(CUDA_VENV)/.dev

test-cuda-wheel: cuda-environment ## Run recipes on CPU ranks with torch's CUDA build (5 GB, in .venv-cuda), on an emulated GPU machine
	@$(CUDA_VENV)/bin/python tools/suite.py cuda-wheel

museum: $(VENV)/.dev $(VENV)/.compiler ## See which bugs are alive with the libraries that are installed (MUSEUM=folder keeps the table)
	@MUSEUM="$(MUSEUM)" $(BIN)/python tools/museum.py

mutants: $(VENV)/.dev $(VENV)/.compiler ## Plant known mistakes in a copy and see that the tests catch them (ONLY=name for one, JOBS=2)
	@ONLY="$(ONLY)" JOBS="$(JOBS)" $(BIN)/python tools/mutants.py

cluster-up: $(VENV)/.python ## Bring up that SLURM on this machine, for your own jobs
	@$(BIN)/python tools/cluster.py up

cluster-down: $(VENV)/.python ## Take it down, with its jobs
	@$(BIN)/python tools/cluster.py down

book: $(VENV)/.dev $(VENV)/.compiler ## Re-execute the pages in place (PAGE=nbs/... for one, FLAGS= lifts cell flags)
	@FLAGS="$(FLAGS)" $(BIN)/python tools/page.py book $(PAGE)

lab: $(VENV)/.lab ## Open JupyterLab on the index
	@$(BIN)/jupyter lab --ServerApp.ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) nbs/index.ipynb

bench: $(VENV)/.dev ## Run the benchmarks (LINE=name for one)
	@$(BIN)/python -m bench.run $(LINE)

bench-gpu: $(VENV)/.dev ## Measure this machine's GPU, part by part, and go on where it was cut off (QUICK=1: 8 minutes; ONLY=part)
	@$(BIN)/python -m bench.gpu $(if $(QUICK),--quick) $(ONLY)

docs: _docs/index.html ## Build the pages as a site in _docs (with Quarto if it is there, else with Sphinx)

_docs/index.html: $(VENV)/.docs _quarto.yml tools/docs.py $(PACKAGE) $(PAGES)
	@$(BIN)/python tools/docs.py

dist: $(VENV)/.dev ## Build and check the wheel and the source archive in dist
	@rm -rf build dist
	@$(BIN)/python -m build --no-isolation > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	@$(BIN)/python -m twine check --strict dist/*

readme: $(VENV)/.dev ## Write README.md from nbs/index.ipynb
	@$(BIN)/python tools/readme.py

stub: $(VENV)/.dev ## Write the list of names that editors and type checkers read
	@$(BIN)/python tools/stub.py

dashboard: $(VENV)/.dev ## Write the Grafana dashboard that the package ships
	@$(BIN)/python tools/dashboard.py

hooks: $(VENV)/.hooks ## Let git merge and Jupyter save notebooks without noise

clean: ## Remove what the other commands made, except the environment
	@rm -rf _proc _docs build dist runs *.egg-info .pytest_cache .last_checked nbs/.last_checked
	@find . \( -path ./$(VENV) -o -path ./$(CUDA_VENV) \) -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -print0 | xargs -0 rm -rf

distclean: clean ## Remove the environment too
	@rm -rf $(VENV) $(CUDA_VENV)

# Set-up: one stamp for each extra; a stamp is made anew when what it was installed from has changed.

$(VENV)/.python:
	@command -v $(PYTHON) > /dev/null || { echo "No $(PYTHON) here: install Python 3.11 to 3.14, or name one with PYTHON=."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), \
	and llm-workbook needs Python 3.11 to 3.14: name one with PYTHON=python3.12."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make an environment: on Debian, install python3-venv."; exit 1; }
	@touch $@

# torch first and alone, so that a CPU build is never replaced by another package's wish.
$(VENV)/.torch: constraints.txt | $(VENV)/.python
	@echo "Installing $(TORCH) $(if $(TORCH_INDEX),from $(TORCH_INDEX),as pip is configured)"
	@$(PIP) '$(TORCH)' $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

$(VENV)/.run $(VENV)/.lab $(VENV)/.docs $(VENV)/.dev: $(VENV)/.%: $(HOUSE) | $(VENV)/.torch
	@echo "Installing llm-workbook with its $* extra"
	@$(PIP) -e '.[$*]'
	@$(COMPILE)
	@touch $@

# DeepSpeed and torch.compile build C++ while pages and tests run; the quickstart and plain training build nothing.
$(VENV)/.compiler: | $(VENV)/.python
	@command -v c++ > /dev/null || command -v g++ > /dev/null || { echo "No C++ compiler: make test and make book need one \
	(on Debian, install g++); make quickstart does not."; exit 1; }
	@touch $@

# nbdev writes Jupyter's hooks below HOME: that is pointed into the environment, so your own settings stay as they are.
$(VENV)/.hooks: $(VENV)/.dev
	@HOME="$(abspath $(VENV))/etc" PATH="$(abspath $(BIN)):$$PATH" $(BIN)/nbdev_install_hooks
	@mkdir -p $(VENV)/etc/jupyter && cp $(VENV)/etc/.jupyter/*.py $(VENV)/etc/jupyter/
	@touch $@
