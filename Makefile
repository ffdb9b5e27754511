# The everyday words. Each one sets up what it needs first, and does nothing twice.
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
# Tools installed by scripts/setup into the virtual environment come first.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CTEST_PARALLEL_LEVEL ?= 2

.PHONY: help run test bench format lint docs install clean release

help: ## list these words
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: release ## build, then show what this machine offers and compare optimizers on a small network
	build/release/bin/torchium info
	build/release/bin/torchium train --optimizer shampoo,soap,muon,kfac,adamw --plot build/train.svg

test: ## build and run every test, then again under the sanitizers
	@scripts/setup build test
	@scripts/test

bench: release ## time the operations, beside PyTorch where it is installed (QUICK=1: fewer, shorter)
	@scripts/bench $(if $(QUICK),--quick)

format: ## lay out the C and Python files
	@scripts/setup lint
	@scripts/lint --fix

lint: ## check layout, clang-tidy, cppcheck and ruff
	@scripts/setup build lint
	@scripts/lint

docs: ## check that every link in the documentation leads somewhere
	@scripts/setup build
	@python3 scripts/check-links

install: release ## install under PREFIX (default /usr/local)
	cmake --install build/release --prefix $(PREFIX)

clean: ## remove everything that was built
	rm -rf build

release:
	@scripts/setup build
	@cmake --preset release
	@cmake --build --preset release
