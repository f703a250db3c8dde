# make demo    see it work (installs into .venv, no torch)
# make test    run all checks (installs into .venv-dev, with torch)
# make model   train the demo model again and put it into the package (some minutes)

PYTHON ?= python3
TORCH ?= torch==2.13.0

.PHONY: demo test lint model clean

demo: .venv/installed
	.venv/bin/stem-edge demo

test: .venv-dev/installed
	.venv-dev/bin/ruff check .
	.venv-dev/bin/ruff format --check .
	.venv-dev/bin/mypy
	.venv-dev/bin/pytest

model: .venv-dev/installed
	.venv-dev/bin/python tools/train_demo.py build/demo
	.venv-dev/bin/stem-edge export build/demo/checkpoint stem_edge/demo_model --force

clean:
	rm -rf .venv .venv-dev build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

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
