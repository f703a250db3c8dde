# make demo    see it work (installs into .venv, no torch)
# make test    lint, types and the tests that a person waits for (installs into .venv-dev, with torch)
# make test-all    every test: also kills, soak, fuzz, training, and ggml, which it compiles
# make test-processors    those that depend on the processor, on ARM64 (as root) and x86 without VNNI
# make coverage   which branches the tests take; fails if some at the trust boundary are missed
# make model   train the demo model again and put it into the package (some minutes)

PYTHON ?= python3
# A process for each core, so that their libraries need no threads; whoever is done takes tests from another.
# Bytecode is written even where the environment says otherwise, because tests start many processes.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 .venv-dev/bin/pytest -q -n logical --dist worksteal
TORCH ?= torch==2.13.0

# How llama-cpp-python compiles ggml here: the same everywhere, for any x86-64 of the last ten years
# and for ARM (where the AVX options mean nothing), not for what this processor announces; without
# its vision library and TLS. pip keeps the wheel that it compiles, so a second environment takes
# seconds; it does not look at the flags again then. After changing them: pip cache remove llama_cpp_python
CMAKE_ARGS ?= -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON \
	-DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF
CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN)
export CMAKE_ARGS CMAKE_BUILD_PARALLEL_LEVEL

# Modules on the trust boundary: those that mutmut changes, and those that work in another process.
BOUNDARY = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["tool"]["mutmut"]["only_mutate"], "*/system/child.py", \
	"*/text/chat_worker.py", "*/first_load/*.py", "*/ggml/check.py", sep=",")

.PHONY: demo test test-all test-processors lint coverage model clean

demo: .venv/installed
	.venv/bin/stem-edge demo

test: lint
	$(PYTEST) -m "not slow"

test-all: .venv-dev/installed-all lint
	$(PYTEST)

test-processors: .venv-dev/installed
	.venv-dev/bin/python tools/processors.py

lint: .venv-dev/installed
	.venv-dev/bin/ruff check .
	.venv-dev/bin/ruff format --check .
	.venv-dev/bin/mypy
	.venv-dev/bin/lint-imports

coverage: .venv-dev/installed-all
	.venv-dev/bin/coverage erase
	.venv-dev/bin/coverage run -m pytest
	.venv-dev/bin/coverage combine --quiet
	.venv-dev/bin/coverage report --fail-under=100 --show-missing --skip-covered --include="$$(.venv-dev/bin/python -c '$(BOUNDARY)')"
	.venv-dev/bin/coverage report --fail-under=90 --format=total

model: .venv-dev/installed
	.venv-dev/bin/python tools/demo/train_demo.py build/demo
	.venv-dev/bin/stem-edge export build/demo/checkpoint stem_edge/demo_model --force
	.venv-dev/bin/python tools/demo/demo_logits.py tests/data

clean:
	rm -rf .venv .venv-dev build dist .coverage* *.egg-info .mypy_cache .pytest_cache .ruff_cache

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

# torch first and by itself: pinned to a release whose build for this platform is known to be small.
.venv-dev/installed: pyproject.toml
	$(PYTHON) -m venv .venv-dev
	.venv-dev/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	.venv-dev/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

# The chat page is tested in a real browser where one is there, or where root can install Debian's.
.venv-dev/installed-all: .venv-dev/installed
	.venv-dev/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev-all]"
	command -v chromedriver || apt-get install -qq --no-install-recommends chromium chromium-driver || \
		{ apt-get update -qq && apt-get install -qq --no-install-recommends chromium chromium-driver; } || \
		echo "no chromium: tests of the chat page will skip"
	touch $@
