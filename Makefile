# Two commands for a fresh machine with Python 3.11: `make lab` and `make test`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
WORKERS ?= 3
SIMGRID := python3-simgrid libsimgrid-dev

.PHONY: lab test test-all check pytest simgrid chromium experiments site clean

# The main job: a mesh and a switch, predicted, run and compared.
lab: $(INSTALLED)
	mkdir -p lab
	for topology in full-mesh switch; do \
		$(BIN)/tasp-lab validate $$topology:8 --schedule ring --schedule multi-ring --shard-bytes 2MiB \
			--plot lab/$$topology.png --trace lab/$$topology-trace.json || exit; \
	done

# Lint, types and layers beside every test but those that need a GPU; those that measure time run by themselves, last.
# Of tests of many examples or combinations a part runs (tests/support/selection.py), and two notebooks.
test: $(INSTALLED) simgrid chromium
	$(MAKE) --jobs 2 check pytest
	$(BIN)/pytest -m alone $$(grep -rl --include="test_*.py" pytest.mark.alone tests)

# The same with all examples, all combinations and all notebooks.
test-all:
	TASP_LAB_TESTS=all $(MAKE) test

pytest: $(INSTALLED)
	$(BIN)/pytest -n $(WORKERS) -m "not gpu and not alone"

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What the network model is tested against: a package of Debian and Ubuntu, which only root can install.
simgrid:
	@PATH=/usr/bin:/bin python3 -c "import simgrid" 2>/dev/null \
	|| { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(SIMGRID); } \
		>/dev/null 2>&1 \
	|| echo "SimGrid is missing (as root: apt-get install $(SIMGRID)): tests against it are skipped, in CI they fail"

# The browser in which the tests look at reports.
chromium:
	@command -v chromium chromium-browser google-chrome >/dev/null \
	|| { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium; } \
		>/dev/null 2>&1 \
	|| echo "Chromium is missing (as root: apt-get install chromium): tests of reports are skipped, in CI they fail"

# All committed tables anew, which takes hours; prints which figures moved. One of them: python -m experiments NAME.
experiments: $(INSTALLED)
	$(BIN)/python -m experiments

# The documents as a site that opens from disk: site/index.html.
site: $(INSTALLED)
	$(BIN)/mkdocs build --strict

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[runtime,transformers,notebooks,search,studies,docs,dev]"
	touch $@

clean:
	rm -rf .venv lab site
