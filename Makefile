# Headrace from a checkout. Each target does all of its own set-up in .venv; a second run finds it done.
#
#   make up [PREFILL=2 DECODE=2 BOTH=0 ROUTER=2 EDGE=1 MODEL=… PORT=… ENGINE=… VERBOSE=1]    start everything; Ctrl-C stops it
#   make up MODELS='folder other-folder'   several models, each with its own workers
#   make test        what takes under 15 minutes        make lint     ruff, mypy, import layers
#   make simulate [SEEDS=10000 FIRST=0]    the control plane under faults, in virtual time
#   make test-all    everything                         make clean    remove .venv and caches
#
# PYTHON=…       a Python 3.11 or 3.12; by default the first one found that runs
# TORCH_INDEX=…  an extra package index that offers PyTorch's CPU build
# TESTS=…        arguments for pytest, such as TESTS=tests/bus

SHELL := /bin/sh
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install $(if $(CI),--progress-bar off) \
       $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: up test test-all simulate lint format model constraints clean help
.DEFAULT_GOAL := help

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

up: $(VENV)/.local
	@exec $(RUN) -m services.cli.main up $(if $(PREFILL),--prefill $(PREFILL)) $(if $(DECODE),--decode $(DECODE)) \
	  $(if $(BOTH),--both $(BOTH)) $(if $(ROUTER),--router $(ROUTER)) $(if $(EDGE),--edge $(EDGE)) $(if $(MODEL),--model '$(MODEL)') $(foreach model,$(MODELS),--model '$(model)') $(if $(PORT),--port '$(PORT)') \
	  $(if $(ENGINE),--engine '$(ENGINE)') $(if $(VERBOSE),--verbose)

test: $(VENV)/.dev model
	$(RUN) -m pytest -m "not slow" $(TESTS)

test-all: $(VENV)/.dev model
	$(RUN) -m pytest $(TESTS)

simulate: $(VENV)/.dev
	$(RUN) -m tests.simulation --seeds $(or $(SEEDS),10000) --first $(or $(FIRST),0)

lint: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

model: $(VENV)/.dev
	@$(RUN) -m services.cli.main models pull

# After a change of pyproject.toml: the versions that are installed now become the pinned ones.
constraints: $(VENV)/.dev
	@{ sed '/^[^#]/,$$d' constraints.txt; $(RUN) -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.new
	@mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) .venv-llama-index build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# .venv/.local and .venv/.dev are written when everything for `make up`, or for the tests, is installed. .venv/.installing
# stands there meanwhile: a .venv that an earlier run left half-made, or whose Python is gone, is made anew.
$(shell $(RUN) -c '' 2>/dev/null || rm -f $(VENV)/.local $(VENV)/.dev)

# One make at a time sets up .venv; another one waits, and then finds it done.
ifndef LOCKED
$(VENV)/.local $(VENV)/.dev: $(INPUTS)
	@flock -n .venv.lock true || echo "Another make is setting up $(VENV) here; waiting for it." >&2
	@flock .venv.lock $(MAKE) --no-print-directory -s LOCKED=1 $@
else
$(VENV)/.local: $(INPUTS)
	@$(venv)
	@echo "Installing Headrace into $(VENV): about 250 MB to download (190 MB of it PyTorch's CPU build$(cuda)), 1.1 GB on disk."
	@$(install_local)

$(VENV)/.dev: $(INPUTS)
	@$(venv)
	@echo "Installing Headrace and its test tools into $(VENV): about 370 MB to download (190 MB of it PyTorch's CPU build$(cuda)), 1.6 GB on disk."
	@$(install_dev)

endif

cuda = $(if $(TORCH_INDEX),,; several GB if pip knows only its CUDA build: see TORCH_INDEX in README.md)
failed = { echo "Installing failed; what pip said is above. The next make begins anew." >&2; exit 1; }
install_local = { $(PIP) -e '.[local]' || $(failed); } && rm -f $(VENV)/.installing && touch $(VENV)/.local
install_dev = { $(PIP) -e '.[dev]' || $(failed); } && rm -f $(VENV)/.installing && touch $(VENV)/.local $(VENV)/.dev

# Versions are asked for by running a Python: a name on the PATH may be a shim that runs nothing.
suits = -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1

define venv
set -e; \
if [ -e $(VENV)/.installing ] || ! $(RUN) $(suits) || ! $(RUN) -m pip --version >/dev/null 2>&1; then \
  python=; \
  for name in $(or $(PYTHON),python3.11 python3.12 python3 python); do \
    if $$name $(suits); then python=$$name; break; fi; \
  done; \
  if [ -z "$$python" ]; then \
    echo "Headrace needs Python 3.11 or 3.12 and found none that runs: install one, or name it with PYTHON=…" >&2; exit 1; \
  fi; \
  echo "Making $(VENV) with $$($$python --version)."; \
  rm -rf $(VENV); \
  mkdir $(VENV); \
  touch $(VENV)/.installing; \
  $$python -m venv $(VENV) || { echo "$$python cannot make a virtual environment (on Debian: apt install python3-venv)" >&2; exit 1; }; \
fi; \
rm -f $(VENV)/.local $(VENV)/.dev; \
touch $(VENV)/.installing
endef
