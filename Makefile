# make demo and make test are all that a newcomer needs: each sets up .venv by itself.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# One thread per test process: two processes are faster than two threads on small tensors. The tests of a file run in one
# of them, because they share fixtures that take seconds. The many small files with doctests come last.
TEST_THREADS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test lint types pytest attack memcheck bench load-test docs docs-site digits clean

demo: $(READY)  ## train on embedded data and print the table
	$(BIN)/plures compare digits --methods deterministic orthogonal-dropout deep-ensemble --runs runs/demo
	$(BIN)/plures report runs/demo/digits --out runs/demo/report.html
	@echo 'Try next: $(BIN)/plures evaluate runs/demo/digits/orthogonal-dropout/seed-0 --shift'

# Types and tests run side by side: some tests wait for processes that they start.
test: $(READY) lint  ## lint, types, tests
	@$(MAKE) --no-print-directory $(if $(filter --jobserver%,$(MAKEFLAGS)),,-j2) types pytest \
	    || { echo 'make test failed: see the errors of types or of pytest above'; exit 1; }

pytest: $(READY)
	$(TEST_THREADS) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

attack: $(READY)  ## bad files, threads and inputs by the thousand, and 500 examples of each property: ATTACK='--only damaged --files 100' for less, --seed 7, --jobs 2
	cd tests && $(TEST_THREADS) ../$(BIN)/python -m attack $(ATTACK)

# The tiles of AVX2 (8 lanes), of AVX-512 (16) and of all others (4), in vectors that every CPU can run.
memcheck:  ## the native kernels under AddressSanitizer, over random layers
	mkdir -p build
	for lanes in 4 8 16; do \
	    $(CC) -std=gnu11 -g -O0 -fsanitize=address,undefined -fno-sanitize-recover -Wno-psabi -DPLURES_PLAIN -DLANES=$$lanes -DNAME=kernels_portable -DTRAINING=training_portable \
	        -DINSTRUCTIONS='"portable"' -DHAVE_PORTABLE -pthread tests/memcheck.c src/plures/native/kernels.c src/plures/native/training.c src/plures/native/library.c -o build/memcheck -lm \
	        && build/memcheck || exit 1; \
	done

bench: $(READY)  ## speed and size, as ratios measured side by side: a quarter of an hour on two idle cores
	$(BIN)/python -m benchmarks

load-test: $(READY)  ## throughput of plures serve, and 10,000 bad requests: a few minutes on the loopback
	$(BIN)/python benchmarks/load_test.py

docs: $(READY)  ## copy the tables of docs/results into docs/results.md
	$(BIN)/python docs/make/tables.py

docs-site: $(READY)  ## build the site, and take every warning for an error: build/site/index.html
	$(BIN)/python -m sphinx -q -E -W --keep-going -d build/site-cache docs build/site

digits: $(READY)  ## make the tables and figures of embedded data again
	$(BIN)/plures reproduce table1 --scale digits --seeds 3 --out docs/results
	$(BIN)/plures reproduce table3 --scale digits --out docs/results
	$(BIN)/plures reproduce figure2 --scale digits --seeds 3 --out docs/results
	$(BIN)/python docs/make/tables.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "plures needs Python 3.11 or newer; try make PYTHON=python3.12")'
	@echo "installing into $(VENV), once: some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[lab,cluster,export,serve,sklearn,docs,dev]'
	touch $(READY)
