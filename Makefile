# Common targets. Each installs its requirements first, and does nothing twice.
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
# Tools installed by scripts/setup into the virtual environment come first.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CTEST_PARALLEL_LEVEL ?= 3

.PHONY: help run test fuzz soak bench format lint docs wheel install clean native

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: native ## build, then show what this machine offers and compare optimizers on a deep autoencoder
	build/native/bin/torchium info
	build/native/bin/torchium train --task autoencode --optimizer shampoo,soap,muon,adamw --plot build/train.svg

test: ## build and run every test, then again under the sanitizers
	@scripts/setup test
	@scripts/test

fuzz: ## the fuzzers, and random arguments to the Python package (TIME=seconds each, or RUNS=executions)
	@scripts/setup test
	@scripts/fuzz

soak: ## train for HOURS hours: memory stays flat, and a second run comes to the same bits
	@scripts/setup test
	@scripts/soak

bench: ## time the operations, vs PyTorch where it is installed (QUICK=1: fewer, shorter)
	@scripts/setup run python
	@scripts/build bench
	@scripts/bench $(if $(QUICK),--quick)

wheel: ## an sdist and a manylinux wheel in dist, with kernels for every GPU where nvcc is found, tried in fresh environments
	@scripts/setup wheel
	@scripts/wheel

format: ## lay out the C and Python files
	@scripts/setup lint
	@scripts/lint --fix

lint: ## check layout, clang-tidy, cppcheck and ruff
	@scripts/setup lint
	@scripts/lint

docs: ## build the website into build/site, and check that every link in the documentation leads somewhere
	@scripts/setup docs
	@scripts/docs

install: native ## install under PREFIX (default /usr/local)
	cmake --install build/native --prefix $(PREFIX)

clean: ## remove everything that was built
	rm -rf build

native:
	@scripts/setup run
	@scripts/build native
