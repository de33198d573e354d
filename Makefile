# Fast Weights: build the book, check everything it claims. `make help`.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: book check clean help mutants notebooks pdf serve
.PHONY: oldest site test test-all types
PORT ?= 8000

# Python: the one given as PYTHON=..., else the first with which it works:
# the pins of constraints.txt have no wheels for a newer one.
PYTHONS := 3.11 to 3.14
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 \
	python3.12 python3.11 python,$(shell $(name) -c '$(FITS)' \
	2>/dev/null && echo $(name))))

# An active environment that has everything is used as it is, else .venv.
ACTIVE := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX))
ifneq ($(subst $(CURDIR)/.venv,,$(ACTIVE)),)
  LACKS := $(shell "$(ACTIVE)/bin/python" book/environment.py 2>&1)
  ifeq ($(LACKS),)
    ENV := $(ACTIVE)
  endif
endif
ENV ?= .venv
PY := "$(ENV)/bin/python"

# make test OTHER=/usr/bin/python3.11 tests the library with that Python, on
# the packages of the first, which has to be of the same minor version.
TESTER := $(if $(OTHER),build/other/bin/python,$(PY))
BESIDE = $(SAY) "environment: build/other, $$("$(OTHER)" --version)" \
	&& "$(OTHER)" book/environment.py beside build/other $(PY)

# What runs the cells: with other versions than before they run again.
READY := build/environment
VERSIONS := $(shell $(PY) book/environment.py versions 2>/dev/null)
ifneq ($(VERSIONS),$(shell cat $(READY) 2>/dev/null))
  .PHONY: $(READY)
endif

# This clone's library, also with an environment that has another's.
export PYTHONPATH := $(CURDIR)/src
export JUPYTER_PREFER_ENV_PATH := 1
export PYDEVD_DISABLE_FILE_VALIDATION := 1

SAY := printf '==> %s\n'
OLD := build/oldest_triton
MODULES := book/node_modules/.package-lock.json
CHAPTERS := $(wildcard chapters/* chapters/api/*)
TEXTS := $(wildcard chapters/*.md) README.md
LIBRARY := $(shell find src -type f ! -name '*.pyc' \
	! -path '*.egg-info/*')
LOOK := $(shell find book -path book/node_modules -prune -o -type f \
	! -name '*.pyc' -print)
SPHINX := $(PY) -m sphinx -c book -b html -n -W --keep-going
PYTEST := -m pytest -q -p no:nbval -n auto --maxprocesses 8 --dist worksteal
UNIT := $(TESTER) $(PYTEST)
BUILT_TESTS := $(addprefix tests/book/test_,answers.py browser.py \
	notebooks.py pdf.py search.py site.py)
LIBRARY_TESTS := tests $(addprefix --ignore ,$(BUILT_TESTS) tests/kernels)
KERNEL_TESTS := tests/kernels
STYLE = $(SAY) "style: ruff" && $(PY) -m ruff check --quiet \
	&& $(PY) -m ruff format --check --quiet
SCRIPTS = import sysconfig; print(sysconfig.get_path("scripts"))
SPELLING = $(SAY) "spelling: typos" \
	&& "$$($(PY) -c '$(SCRIPTS)')/typos" --format brief

help: ## list what can be made
	@echo "Fast Weights: what can be made"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) \
		| expand -t 18
	@echo
	@echo "Each installs what it needs into .venv first, or uses the active"
	@echo "virtual or conda environment if that has it all already."
	@echo "PYTHON=python3.12 chooses the Python of .venv ($(PYTHONS))."

book: build/book ## read: the site in build/html, every chapter executed
	@$(SAY) "read it: build/html/index.html (or: make serve)"

notebooks: build/notebooks.made ## run: build/notebooks, for Jupyter and Colab

pdf: build/book ## print: build/fast-weights.pdf, by Chromium
	@$(SAY) "pdf: printing the site"
	@$(PY) book/pdf.py build/html build/fast-weights.pdf
	@$(SAY) "read it: build/fast-weights.pdf"

serve: build/book ## the site on http://localhost:8000 (PORT=...)
	@$(SAY) "http://localhost:$(PORT) (stop: Ctrl-C)"
	@$(PY) -m http.server --bind 127.0.0.1 --directory build/html $(PORT)

check: $(READY) $(MODULES) ## in 90 seconds: style, types, tests of what you changed
	@$(STYLE)
	@$(SPELLING)
	@$(MAKE) --no-print-directory -j2 types build/grammar
	@$(SAY) "library: the tests of what the change touches"
	@OMP_NUM_THREADS=1 $(PY) tools/touched.py
	@$(SAY) "kernels: those of them that Triton's interpreter runs"
	@OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PY) tools/touched.py --interpreted

test: $(READY) $(MODULES) ## check style, types, library, chapters, site
	@$(STYLE)
	@$(SPELLING)
	@$(MAKE) --no-print-directory -j2 types build/grammar
	@$(if $(OTHER),$(BESIDE))
	@$(SAY) "library: unit tests"
	@OMP_NUM_THREADS=1 $(UNIT) -m "not full and not script" \
		$(LIBRARY_TESTS)
	@$(SAY) "kernels: Triton's interpreter, in a process of its own"
	@OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(UNIT) -m "not full" \
		$(KERNEL_TESTS)
	@$(SAY) "chapters: run each, then the answers to its exercises"
	@rm -rf build/test
	@$(PY) book/execute.py --fresh --cells build/test/cells \
		--then tools/chapter_answers.py
	@$(MAKE) --no-print-directory -j2 site oldest
	@$(SAY) "site: answers, links, alt texts, in a browser; notebooks"
	@$(PY) $(PYTEST) $(BUILT_TESTS)

test-all: test ## test, all parameters crossed, notebooks, other versions
	@$(SAY) "library: the combinations that make test leaves out"
	@OMP_NUM_THREADS=1 $(UNIT) -m full $(LIBRARY_TESTS)
	@OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(UNIT) -m full $(KERNEL_TESTS)
	@$(SAY) "notebooks: run each from its first cell to its last"
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --maxprocesses 8 \
		--nbval-lax --dist loadscope build/notebooks
	@$(SAY) "versions: the oldest and the newest PyTorch and Triton"
	@PYTHONPATH=src $(PY) tools/pairs.py oldest -n auto
	@PYTHONPATH=src $(PY) tools/pairs.py newest -n auto

mutants: $(READY) ## break the library a line at a time: a test must notice
	@$(PY) tools/mutants.py

# `pip install .` too builds in build/, and keeps there what was renamed:
# clean before building a wheel.
clean: ## remove what was built (.venv and book/node_modules stay)
	@$(SAY) "removing build and the caches"
	@rm -rf build .hypothesis .mypy_cache .pytest_cache .ruff_cache

build/book: $(READY) $(MODULES) build/notebooks.made $(CHAPTERS) \
		$(LIBRARY) $(LOOK)
	@$(SAY) "site: running the chapters whose cells or library changed"
	@$(PY) book/execute.py
	@$(SPHINX) -d build/doctrees chapters build/html
	@touch $@

# Their first cell installs the library of this commit.
build/notebooks.made: $(READY) $(CHAPTERS) $(LOOK) $(wildcard .git/logs/HEAD)
	@$(SAY) "notebooks: writing build/notebooks"
	@rm -rf build/notebooks
	@$(PY) book/notebooks.py --out build/notebooks
	@touch $@

# Those that changed; all of them if the checker or its words did.
oldest: $(OLD)/.made ## part of test: the oldest Triton reads the kernels
	@$(SAY) "kernels: read by the oldest Triton"
	@PYTHONPATH=$(OLD):src $(PY) tools/oldest_triton.py

$(OLD)/.made: $(READY)
	@$(SAY) "the oldest Triton tested, beside the other"
	@$(PY) -m pip install --quiet --no-deps --upgrade --target $(OLD) \
		"triton==3.6.*"
	@touch $@

site: build/notebooks.made ## part of test: the site, of the cells it has run
	@$(SAY) "site: every warning an error"
	@$(SPHINX) -D nb_execution_cache_path="$(CURDIR)/build/test/cells" \
		-d build/test/doctrees chapters build/test/html

types: $(READY) ## part of check: mypy
	@$(SAY) "types: mypy"
	@$(PY) -m mypy

build/grammar: $(MODULES) book/grammar.mjs book/words.txt $(TEXTS)
	@$(SAY) "grammar: harper"
	@mkdir -p build
	@node book/grammar.mjs \
		$(if $(filter-out %.md,$?),$(TEXTS),$(filter %.md,$?))
	@touch $@

$(READY): pyproject.toml constraints.txt $(if $(filter-out .venv,$(ENV)),,.venv/ready)
	@mkdir -p build
	@$(PY) book/environment.py versions > $@
	@$(SAY) "environment: $(ENV), $$(cat $@)"

.venv/ready: pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "Python $(PYTHONS) is needed and none was found:" \
			"install one, or name it: make PYTHON=/path/to/python3"; \
		exit 1; \
	fi
	@"$(PYTHON)" -c '$(FITS)' 2>/dev/null || { \
		echo "Python $(PYTHONS) is needed; $(PYTHON) is" \
			"$$("$(PYTHON)" --version 2>&1 | tail -n 1)"; \
		exit 1; \
	}
	@$(if $(LACKS),$(SAY) "environment: $(ACTIVE) lacks $(LACKS)")
	@$(SAY) "environment: .venv, made with $$("$(PYTHON)" --version)"
	@test -x .venv/bin/python && .venv/bin/python -c '$(FITS)' \
		|| "$(PYTHON)" book/environment.py make .venv
	@$(SAY) "environment: installing the packages (PyTorch is large)"
	@.venv/bin/python -m pip install --disable-pip-version-check \
		--no-compile -c constraints.txt \
		-e '.[chapters,book,models,test]'
	@.venv/bin/python -m compileall -qq -j 0 -x '/(tests|transformers)/' \
		.venv/lib || true # quicker
	@touch $@

$(MODULES): book/package.json book/package-lock.json
	@command -v npm >/dev/null || { \
		echo "node and npm are needed, for the site's equations" \
			"(Temml) and its grammar (harper): install nodejs" \
			"and npm"; \
		exit 1; \
	}
	@$(SAY) "site: fetching Temml and harper with npm"
	@cd book && npm ci --ignore-scripts --loglevel error
	@touch $@
