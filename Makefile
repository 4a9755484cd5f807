# `make demo` and `make test` need nothing but Python 3.10-3.13 and make.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?=
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install demo cluster-demo rl test slow soak check format bench clean

# The tests of the cluster mostly wait for processes, so they run beside the others; their output
# comes last. A shell lets what it starts so ignore Ctrl-C, which some of them send. Where PYTEST_ARGS
# leave nothing of one half (status 5), the other decides.
HEARS_SIGINT := import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); \
	os.execv(sys.executable, [sys.executable, '-m', 'pytest', *sys.argv[1:]])

define both
	@log=$$(mktemp); \
	$(RUN) -c "$(HEARS_SIGINT)" -m "$(1)" tests/cluster $(PYTEST_ARGS) > $$log 2>&1 & beside=$$!; \
	$(RUN) -m pytest -m "$(1)" --ignore=tests/house --ignore=tests/cluster $(PYTEST_ARGS); main=$$?; \
	wait $$beside; beside=$$?; cat $$log; rm -f $$log; \
	test $$main = 5 && exit $$beside; test $$beside = 5 && exit $$main; exit $$((main + beside))
endef

help: ## say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo "  PYTHON=python3.12 chooses the interpreter, PYTEST_ARGS and BENCH_ARGS are passed on"

install: $(INSTALLED) ## make .venv with pinned versions and this checkout, editable

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "persisting_torch needs Python 3.10 or newer, $(PYTHON) is " + sys.version.split()[0] + "; choose another with PYTHON=...")'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV) (once; minutes)"
	@$(RUN) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[cli,cluster,s3,frameworks,rl,dev]'
	@touch $@

demo: $(INSTALLED) ## train from a queue while producers fill it, kill the trainer, resume, count
	$(RUN) examples/digits_lightning.py

cluster-demo: $(INSTALLED) ## three nodes, rollouts and a trainer on loopback; a node is killed, then count
	$(RUN) examples/cluster/demo.py

rl: $(INSTALLED) ## the two GRPO examples to their thresholds, every process killed once (ten minutes each)
	$(RUN) examples/grpo/arithmetic.py
	$(RUN) examples/grpo/cartpole.py

test: $(INSTALLED) ## all tests but the slow ones, and but those of `make check`
	$(call both,not slow)

slow: $(INSTALLED) ## the tests that need minutes, kill tests among them
	$(call both,slow and not soak)

soak: $(INSTALLED) ## further kill tests, at more moments and at random; not part of CI
	$(RUN) -m pytest -m soak $(PYTEST_ARGS)

check: $(INSTALLED) ## lint, format, types, one-way imports, code blocks of README and docs
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m pytest tests/house $(PYTEST_ARGS)

format: $(INSTALLED) ## apply ruff's fixes and format
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

bench: $(INSTALLED) ## the benchmarks: queue beside plain Lance, waiting, late fields, retention, peers
	$(RUN) benchmarks/queue_local.py $(BENCH_ARGS)
	$(RUN) benchmarks/waiting.py
	$(RUN) benchmarks/late_fields.py
	$(RUN) benchmarks/retention.py
	$(RUN) benchmarks/resume_matrix.py
	$(RUN) benchmarks/vs_transferqueue.py
	$(RUN) benchmarks/cluster.py

clean: ## remove the environment, caches and what the demo left behind
	rm -rf $(VENV) build dist demo_data cluster_data grpo_data lightning_logs checkpoints
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
