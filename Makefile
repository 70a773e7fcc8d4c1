# Everything a newcomer needs: `make demo` and `make test` do their own set-up in $(VENV).
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
COUNT  ?= 100000

# Many processes import the package: they shall compile it once, wherever that is switched off.
export PYTHONDONTWRITEBYTECODE :=

BIN   := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint gpu speed mutants kill faults soak fuzz mixing reproduce pages deploy-page api clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Variables: PYTHON ($(PYTHON)), VENV ($(VENV)), JOBS ($(JOBS), test processes), COUNT ($(COUNT), messages)"

setup: $(READY) ## install the package and its tools into $(VENV); does nothing when done already

# The stamp is written last: a broken installation is tried again, a finished one is not.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Anyfleet needs Python 3.11 or newer; try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report,dev,fleet]'
	@touch $@

demo: $(READY) ## run the main job on the embedded data: 20 unequal devices, six methods
	$(BIN)/anyfleet demo

test: lint ## lint, types, then all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(READY) ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -n $(JOBS)

gpu: $(READY) ## run the checks that need a CUDA device; without one it says so
	@$(BIN)/python -m tools.gpu

speed: $(READY) ## measure speed: all tables go into build/speed (GPU 8 minutes, CPU more)
	$(BIN)/python -m benchmarks.speed --out build/speed

mutants: $(READY) ## plant known faults one by one: each must turn a test red (some minutes)
	$(BIN)/python tools/mutants.py

kill: $(READY) ## kill a hundred runs at random moments and resume them: nothing may differ (a minute)
	$(BIN)/python -m tools.kill 100

faults: $(READY) ## kill, cut and deceive a real fleet on loopback: no round may be lost (an hour)
	$(BIN)/python -m tools.fleet_faults --tries 20 --page

soak: $(READY) ## play 200 rounds on 8 real devices under random faults: memory must be bounded
	$(BIN)/python -m tools.fleet_faults --soak 200 --page

fuzz: $(READY) ## spoil messages (COUNT of them) and read them: only refusals may come of it
	$(BIN)/python -m tools.fuzz $(COUNT)

mixing: $(READY) ## mix every two parts and run them: docs/mixing.md is written (some minutes)
	$(BIN)/python -m tools.mixing --jobs $(JOBS)

reproduce: $(READY) ## run a table or figure on real data: make reproduce ITEM=thesis/figure_3_2; without ITEM: list them
	$(BIN)/anyfleet reproduce $(or $(ITEM),--list)

pages: $(READY) ## write the generated pages of the documentation: keys of run files, table of parts
	$(BIN)/python -m tools.pages

deploy-page: $(READY) ## run docs/deploy.md in two fresh environments (some minutes)
	$(BIN)/python -m tools.run_deploy_page

api: $(READY) ## write the API reference as HTML into build/api
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/pdoc --docformat markdown --output-directory build/api anyfleet
	@echo "Open build/api/anyfleet.html"

clean: ## remove the environment, builds and caches
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
