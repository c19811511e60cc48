# Two commands on a fresh machine: `make run` and `make test`. They need git, make and a Python 3;
# tools/setup.py does the rest, and does nothing when there is nothing to do.
# PYTHON runs the set-up only; ROWSTEP_PYTHON names the Python 3.10 to use.

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all test-gpu test-mlflow-oldest torture lint format schema wheel bench docker lock clean

PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml
ARGS ?=
BIN := .venv/bin
ROOMS := configs optimizers components pipeline

help:
	@echo "make setup     find Python 3.10, install the lock and rowstep into .venv"
	@echo "make run       the main job on $(CONFIG)  (CONFIG=file.yaml ARGS='--set train.epochs=2')"
	@echo "make test      the default tests          (ARGS='-k name')"
	@echo "make test-all  the slow ones too"
	@echo "make test-gpu  those that need an accelerator"
	@echo "make test-mlflow-oldest  the tracking against the oldest MLflow that is supported"
	@echo "make torture   kill, stop and spoil checkpoints for an hour  (ARGS='--seed 2')"
	@echo "make lint      formatting, ruff, mypy;  make format mends the first"
	@echo "make schema    write configs/schema.json"
	@echo "make wheel     build dist/*.whl"
	@echo "make bench     the measurements of benchmarks/"
	@echo "make docker    build the image 'rowstep'"
	@echo "make lock      resolve requirements/*.txt again"
	@echo "make clean     remove what was built; .venv stays"

setup:
	@$(PYTHON) tools/setup.py

run: setup
	@$(BIN)/rowstep run $(CONFIG) $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

test-all: setup
	@$(BIN)/python -m pytest -m "not gpu" $(ARGS)

test-gpu: setup
	@$(BIN)/python -m pytest -m gpu $(ARGS)

# The tracking imports neither TensorFlow nor TFX, so an environment of its own is small. What
# SQLAlchemy tells the old MLflow to write differently is not ours to mend.
OLDEST := build/mlflow-oldest
MLFLOW_OLDEST ?= 3.1.4

test-mlflow-oldest: setup
	@rm -rf build/lib build/bdist.*
	@test -x $(OLDEST)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(OLDEST)
	@$(BIN)/uv pip install --quiet --python $(OLDEST)/bin/python \
	  "mlflow==$(MLFLOW_OLDEST)" matplotlib "pytest>=8"
	@$(BIN)/uv pip install --quiet --no-deps --reinstall-package rowstep \
	  --python $(OLDEST)/bin/python .
	@$(OLDEST)/bin/python -m pytest -W ignore::DeprecationWarning \
	  tests/components/test_tracking_*.py $(ARGS)

torture: setup
	@$(BIN)/python tests/torture/torture.py $(ARGS)

lint: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy $(ROOMS)

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

schema: setup
	@$(BIN)/rowstep schema > configs/schema.json.new && mv configs/schema.json.new configs/schema.json

# setuptools would put modules deleted since the last build into the wheel again.
wheel: setup
	@rm -rf build/lib build/bdist.*
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . > dist.log 2>&1 \
	  || { cat dist.log >&2; rm -f dist.log; exit 1; }
	@rm -f dist.log; ls dist/*.whl

bench: setup
	@set -e; for script in benchmarks/*.py; do $(BIN)/python "$$script" $(ARGS); done

docker:
	docker build --tag rowstep .

COMPILE := $(BIN)/uv pip compile --quiet --extra mlflow --extra dev --no-annotate \
  --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" pyproject.toml

lock: setup
	$(COMPILE) --python-version 3.10 --python-platform x86_64-manylinux_2_36 \
	  requirements/tfx-1.16-py310.in --output-file requirements/tfx-1.16-py310.txt
	$(COMPILE) --python-version 3.13 --python-platform x86_64-manylinux_2_39 \
	  requirements/tfx-1.21-py313.in --output-file requirements/tfx-1.21-py313.txt

clean:
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .venv/rowstep-setup.json
	@find $(ROOMS) tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
