#!/usr/bin/env bash
# From a fresh checkout to a trained step: plans the bundled rollouts, trains one step compactly and one
# trajectory by trajectory on the CPU, and compares them. Arguments go to `harts run`.
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" torch
exec harts run pipelines/quickstart.yaml "$@"
