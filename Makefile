# Each target does what it needs of the ones before it. The second run of anything needs neither network nor root.
SHELL := /bin/bash
build := build/release
jobs = $(shell scripts/jobs.sh)
# On a terminal ninja shows how far it is; elsewhere only what goes wrong.
quiet := $(shell test -t 2 || echo --quiet)
fuzz_targets := safetensors_header_fuzz model_config_fuzz rollout_line_fuzz
fuzz_seconds ?= 30

.DEFAULT_GOAL := help
.PHONY: help environment setup build test test-slow demo bench lint format asan clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: build  ## everything from nothing: Debian packages, .venv with pinned requirements, the library, the command

environment:
	@scripts/setup.sh

$(build)/build.ninja: | environment
	@cmake --preset release >/dev/null

build: environment $(build)/build.ninja  ## configure and compile; the command is .venv/bin/zorro
	@ninja -C $(build) -j $(jobs) $(quiet)
	@scripts/link_build.sh $(build)

test: build  ## quick tests of C++ and Python
	@scripts/run_tests.sh quick

test-slow: build  ## the tests marked slow, and each fuzz target for 30 s
	@scripts/run_tests.sh slow
	@scripts/install-packages.sh scripts/debian-packages-fuzz.txt
	@cmake --preset fuzz >/dev/null
	@ninja -C build/fuzz -j $(jobs) $(quiet) $(fuzz_targets)
	@scripts/fuzz.sh $(fuzz_seconds) $(fuzz_targets)

demo: build  ## the main job on the shipped example: exactness, then the update timed against its bound
	@.venv/bin/zorro demo

bench: build  ## micro benchmarks and the two arms of the default model
	@cmake --preset bench >/dev/null
	@ninja -C build/bench -j $(jobs) $(quiet) zorro_micro
	@build/bench/bench/micro/zorro_micro
	@.venv/bin/zorro bench --prompt 1024 --response 128 --rollouts-per-prompt 8

lint: environment $(build)/build.ninja  ## formatting, clang-tidy, ruff, mypy, layer table
	@scripts/install-packages.sh scripts/debian-packages-lint.txt
	@ninja -C $(build) --quiet build.ninja
	@scripts/lint.sh

format: environment  ## apply clang-format and ruff
	@scripts/install-packages.sh scripts/debian-packages-lint.txt
	@scripts/sources.sh '*.h' '*.cpp' | xargs clang-format-19 -i
	@.venv/bin/ruff format --quiet .

asan: environment  ## quick C++ tests under the address and undefined-behaviour sanitizers
	@cmake --preset asan >/dev/null
	@ninja -C build/asan -j $(jobs) $(quiet) cpp_tests
	@ctest --test-dir build/asan -L quick --output-on-failure --parallel 2

clean:  ## remove the build trees (not .venv)
	@rm -rf build
