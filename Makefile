# Two commands for a fresh machine with Python 3.11: `make lab` and `make test`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
WORKERS ?= 2
SIMGRID := python3-simgrid libsimgrid-dev

.PHONY: lab test check simgrid chromium experiments site clean

# The main job: a mesh and a switch, predicted, run and compared.
lab: $(INSTALLED)
	$(BIN)/python -m experiments.lab

# Lint, types, layers, then every test but those that need a GPU; those that measure time run by themselves.
test: $(INSTALLED) check simgrid chromium
	$(BIN)/pytest -n $(WORKERS) -m "not gpu and not alone"
	$(BIN)/pytest -m alone $$(grep -rl --include="test_*.py" pytest.mark.alone tests)

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

# The long tables, written to experiments/results and experiments/benchmarks/results.
experiments: $(INSTALLED)
	$(BIN)/python -m experiments.tables.all_gather
	$(BIN)/python -m experiments.tables.decomposition --measure
	$(BIN)/python -m experiments.tables.attention_curve
	$(BIN)/python -m experiments.tables.contention
	$(BIN)/python -m experiments.tables.other_kernels
	$(BIN)/python -m experiments.tables.passes
	$(BIN)/python -m experiments.tables.layer_errors
	$(BIN)/python -m experiments.tables.dtypes
	$(BIN)/python -m experiments.tables.training
	$(BIN)/python -m experiments.tables.hybrids
	$(BIN)/python -m experiments.tables.search
	$(BIN)/python -m experiments.tables.search_optimum
	$(BIN)/python -m experiments.tables.dropped_dependencies
	-$(BIN)/python -m experiments.tables.astra_sim
	$(BIN)/python -m experiments.tables.schedules_on_the_fabric
	$(BIN)/python -m experiments.tables.ranking_on_the_fabric
	$(BIN)/python -m experiments.tables.linear_on_the_fabric
	$(BIN)/python -m experiments.tables.found_on_the_fabric
	$(BIN)/python -m experiments.reproductions all
	$(BIN)/python -m experiments.tables.whole_steps
	$(BIN)/python -m experiments.accuracy.report
	$(BIN)/python -m experiments.accuracy.step_curve
	$(BIN)/python -m experiments.accuracy.fabric
	$(BIN)/python -m experiments.benchmarks.commands
	$(BIN)/python -m experiments.benchmarks.scale
	$(BIN)/python -m experiments.benchmarks.structure
	$(BIN)/python -m experiments.benchmarks.executor_cost
	$(BIN)/python -m experiments.benchmarks.agreement_cost
	$(BIN)/python -m experiments.benchmarks.helper_kernels
	$(BIN)/python -m experiments.benchmarks.tuned_ring
	$(BIN)/python -m experiments.benchmarks.beside_others
	$(BIN)/python -m experiments.benchmarks.study_speed
	$(BIN)/python -m experiments.benchmarks.peers

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
