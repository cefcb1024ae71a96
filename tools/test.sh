#!/usr/bin/env bash
# The whole gate: format, lint, types, layers, tests. Arguments go to pytest.
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" torch,fla,hf,megatron,dev
export OMP_NUM_THREADS=1
ruff format --check .
ruff check .
mypy
lint-imports
exec pytest -n 2 -m "not gpu" "$@"
