# Two commands do everything on a fresh machine:  make lab  and  make test
#
#   make lab        set up, then open the course in JupyterLab
#   make test       set up, then tests, every notebook, every solution, every exercise
#   make lint       ruff, mypy, and: are the exercises up to date with the solutions?
#   make course     re-execute every notebook in place
#   make exercises  write exercises/ from solutions/
#   make bench      how fast we are beside the alternatives
#   make clean      forget the set-up
#
# Choices, each with a default:
#   PYTHON=python3.13           which Python makes .venv      (default: the first that is new enough)
#   TORCH_INDEX=URL             where torch comes from        (default: see `torch_index` below)
#   CONSTRAINTS=FILE            which versions are installed  (default: the tested set)

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
CPU_INDEX := https://download.pytorch.org/whl/cpu
NBVAL := $(BIN)/python -m pytest -p no:cacheprovider --nbval-current-env --nbval-cell-timeout=120

.PHONY: lab test lint course exercises bench clean help
help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,14p'

lab: $(VENV)/.installed
	$(BIN)/picotron-edu lab

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests --timeout=240 --numprocesses=2
	$(NBVAL) --nbval --nbval-sanitize-with=tests/sanitize.cfg notebooks
	$(NBVAL) --nbval-lax solutions

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/picotron-edu build-exercises --check

course: $(VENV)/.installed
	$(BIN)/python -m picotron_edu.course.notebook notebooks/*.ipynb

exercises: $(VENV)/.installed
	$(BIN)/picotron-edu build-exercises

bench: $(VENV)/.installed-dev
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

clean:
	rm -rf $(VENV)

# ---- set-up: a stamp file says what .venv holds, so that a second call has nothing to do ----

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@$(call install,.)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@$(call install,.[dev])
	@touch $@ $(VENV)/.installed

$(BIN)/python:
	@for python in $(PYTHON) $(if $(PYTHON),,python3 python3.14 python3.13 python3.12 python3.11); do \
	  command -v $$python >/dev/null || continue; \
	  found="$$found $$python is $$($$python -V 2>&1);"; \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  if ! $$python -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "$$python has no venv. Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; fi; \
	  echo "making $(VENV) with $$python, $$($$python -V 2>&1)"; \
	  exec $$python -m venv $(VENV); \
	done; \
	echo "The course needs Python 3.11 or newer;$${found:- found none;}" \
	  "install one (https://www.python.org/downloads) and say: make PYTHON=/path/to/python3.12" >&2; \
	exit 1

# The default torch wheel for Linux carries CUDA, several GB. Without an NVIDIA GPU take the small
# one from torch's own index, if that answers; macOS has only one kind of wheel.
torch_index = $$(if [ "$$(uname)" = Linux ] && ! nvidia-smi >/dev/null 2>&1 \
  && timeout 8 $(BIN)/python -c 'import sys, urllib.request as web; web.urlopen(sys.argv[1], timeout=5)' \
  $(CPU_INDEX)/torch/ 2>/dev/null; then echo "$(CPU_INDEX)"; fi)

install = index="$(if $(TORCH_INDEX),$(TORCH_INDEX),$(torch_index))"; \
  echo "installing $(1) (versions: $(CONSTRAINTS); torch from: $${index:-the plain index}) (takes 2-4 minutes)"; \
  $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) \
  $${index:+--extra-index-url "$$index"} --editable '$(1)'
