# Two commands for a newcomer: `make demo` and `make test`. Everything lands in .venv.
PYTHON ?= python3
# What the suite was tested with; on a machine without a GPU, TORCH='torch --index-url https://download.pytorch.org/whl/cpu'
# saves gigabytes. Only the target that makes .venv installs it.
TORCH ?= torch==2.13.0
BIN := .venv/bin
# Prefect gives its embedded server 20 s, which a busy laptop may exceed.
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS ?= 120
# tests/conftest.py says how many workers "logical" is.
SIDE_BY_SIDE := --numprocesses=logical --maxprocesses=8 --dist=loadfile --no-loadscope-reorder

.PHONY: demo test check quick gpu lint ruff mypy pyright docs ray-pages screenshots bench chaos soak install s3rver azurite wheel-check floors

demo: install
	$(BIN)/python examples/digits.py

test: install s3rver azurite
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# For daily work, in some 90 s on two cores: lint, types, and the tests that start no server and few processes, side by side.
check: install
	@$(MAKE) --jobs=2 --old-file=install quick lint

quick: install
	$(BIN)/python -m pytest --quick --quiet $(SIDE_BY_SIDE)

# What needs GPUs, on a machine that has some: writes gpu-results.json, with versions, devices, outcomes and figures.
gpu: install
	$(BIN)/python -m pytest tests/gpu --timeout=900

lint: pyright mypy ruff

ruff: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: install
	$(BIN)/mypy --package prefect_torch
	$(BIN)/mypy examples tests/typing docs/extensions

pyright: install
	$(BIN)/pyright

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What pages say about Ray Train, from its tests and from the rows of migrate-check.
ray-pages: install
	$(BIN)/python docs/extensions/ray_pages.py

# The pictures of the documentation, from Chromium's visit to a real server; apt install chromium pngquant.
screenshots: install
	PREFECT_TORCH_SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/browser
	pngquant --force --skip-if-larger --ext .png 64 docs/images/*.png

# Some ninety minutes on two idle cores; each program prints its table and writes it to tests/benchmarks/results. The directories
# come first: ext4 creates files slowly for minutes after many were deleted.
bench: install
	$(BIN)/python tests/benchmarks/directories.py
	$(BIN)/python tests/benchmarks/main_job.py
	$(BIN)/python tests/benchmarks/start.py
	$(BIN)/python tests/benchmarks/resume.py
	$(BIN)/python tests/benchmarks/integrations.py
	$(BIN)/python tests/benchmarks/scaling.py
	$(BIN)/python tests/benchmarks/agreement.py
	$(BIN)/python tests/benchmarks/idle_leader.py
	$(BIN)/python tests/benchmarks/leader_memory.py
	$(BIN)/python tests/benchmarks/many_checkpoints.py
	$(BIN)/python tests/benchmarks/report_events.py
	$(BIN)/python tests/benchmarks/sweeps.py
	$(BIN)/python tests/benchmarks/sweep_cost.py
	TORCH='$(TORCH)' $(BIN)/python tests/benchmarks/peers/install.py
	$(BIN)/python tests/benchmarks/state
	$(BIN)/python tests/benchmarks/goodput.py
	$(BIN)/python tests/benchmarks/goodput_machines.py
	$(BIN)/python tests/benchmarks/durable_reports.py

# Kills a training at every file event of a save, a prune and a resume: about ten minutes on two idle cores.
chaos: install
	$(BIN)/python tests/benchmarks/chaos.py

# Kills ranks, the flow and the S3 server at random while it trains: twenty minutes. Then ranks, trials and sweeps, twenty times each.
soak: install
	$(BIN)/python tests/benchmarks/soak.py --storage local
	$(BIN)/python tests/benchmarks/soak.py --storage s3
	$(BIN)/python tests/benchmarks/sweep_soak.py --where here
	$(BIN)/python tests/benchmarks/sweep_soak.py --where deployment

# The wheel in clean environments without constraints, one for each PYTHONS; WITH='--without-torch python3.12' for Pythons whose
# torch has no small build, WITH=--linked-torch to borrow the torch of .venv.
PYTHONS ?= $(PYTHON)
wheel-check: install
	$(BIN)/python tests/wheel_check.py $(PYTHONS) --torch '$(TORCH)' $(WITH)

# The suite with the lowest versions that pyproject.toml allows; writes tests/benchmarks/results/floors.txt. FLOOR_TORCH as TORCH.
FLOOR_TORCH ?= torch==2.9.0
floors: install
	$(BIN)/python tests/floors.py .venv/floors --torch '$(FLOOR_TORCH)'

# An S3-speaking server that tests need for its odd listings; without npm, they are skipped.
s3rver: .venv/s3rver/node_modules
.venv/s3rver/node_modules:
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix .venv/s3rver s3rver@3.7.1; fi

# An Azure-speaking server for the blocks of prefect-azure; without npm, its tests are skipped.
azurite: .venv/azurite/node_modules
.venv/azurite/node_modules:
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix .venv/azurite azurite@3.37.0; fi

# Links every file of the package into .venv; again each time, since a new file needs a link of its own. Compiles them, as pip
# does those it copies: where PYTHONDONTWRITEBYTECODE is set, as in many containers, every process would compile them again.
# -qq, since newer pips show setuptools' warnings of editable installations, 15 lines before each target.
install: .venv/dependencies
	@$(BIN)/pip install -qq --no-deps --no-build-isolation -c constraints.txt -e .
	@$(BIN)/python -m compileall -q build/__editable__*  # other programs of the tests build there, too

# Newer pips resolve in a third of the time, and compile on one core only: together two minutes of four.
NEVER_IMPORTED := /tests?/|/transformers/models/
.venv/dependencies: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt 'pip>=25' 'setuptools>=77' wheel
	$(BIN)/pip install --quiet --no-compile $(TORCH)
	$(BIN)/pip install -qq --no-compile --no-build-isolation -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '$(NEVER_IMPORTED)' .venv/lib || true  # some packages have templates that are no Python
	@touch $@
