# Sourced by the other scripts: makes .venv if need be, and installs HARTS into it with the extras named in $1.
# torch comes first and pinned, so that nothing else decides which build of it is taken.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "HARTS needs Python 3.11 or newer; set PYTHON" >&2; exit 2; }
[ -d .venv ] || "$python" -m venv .venv
. .venv/bin/activate
pip install --quiet --disable-pip-version-check "${HARTS_TORCH:-torch==2.13.0}"
pip install --quiet --disable-pip-version-check --editable ".[$1]"
