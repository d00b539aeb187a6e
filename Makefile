# Each command sets up what it needs; a second run starts at once.
.PHONY: help setup check test-fast test demo isolation bench up down lock clean
.DEFAULT_GOAL := help
SHELL := bash
BIN := .venv/bin
SETUP := @scripts/setup.sh
# Two at a time, each with services of its own: most tests wait, for a session to end or a process to start.
SPREAD := $(BIN)/pytest --numprocesses 2 --dist loadfile

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | column -t -s "$$(printf '\t')"

setup:  ## everything that the other commands need
	$(SETUP) engines kafka redis model

check:  ## format, lint, types, rooms
	$(SETUP) tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-fast:  ## tests that need no service and no engine
	$(SETUP) tools
	$(SPREAD) -q -m "not kafka and not redis and not engine and not slow"

test:  ## every test, on a real Kafka, Redis and engine
	$(SETUP) engines kafka redis model
	$(SPREAD) -m "not alone"
	$(BIN)/pytest -m alone

demo:  ## the whole product on one machine, with a real model
	$(SETUP) engines kafka redis model
	$(BIN)/python -m scripts.demo

isolation:  ## what one tenant tries against another, as a table with proofs
	$(SETUP) tools kafka redis
	$(BIN)/python -m tests.isolation

bench:  ## the measured figures of the README
	$(SETUP) engines kafka redis model
	$(BIN)/python -m tests.bench

up:  ## a stack that stays
	$(SETUP) engines kafka redis model
	SWITCHYARD_ENGINE_BASE=$(CURDIR)/.cache/base/smollm2-135m-instruct $(BIN)/switchyard up

down:  ## stop it
	$(BIN)/switchyard down

lock:  ## compile requirements/*.txt again
	$(SETUP) tools
	scripts/lock.sh

clean:  ## remove everything that setup made
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
