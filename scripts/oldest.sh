#!/usr/bin/env bash
# Run the tests with the oldest dependencies that pyproject.toml allows:
#     scripts/oldest.sh [pytest's arguments]
# PyTorch's wheels for Linux bring CUDA's libraries, about 3 GB; PIP_EXTRA_INDEX_URL may name an index that
# has it for CPUs. Warnings are shown and fail no test: old packages do not know newer ones.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/oldest
if [ ! -x "$venv/bin/pytest" ] || [ constraints-oldest.txt -nt "$venv/.installed" ]; then
    "${PYTHON:-python3.11}" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --constraint constraints-oldest.txt \
        --editable . build hypothesis pillow pytest pytest-xdist selenium "setuptools>=77"
    touch "$venv/.installed"
fi
# Extras, and a format of checkpoints that PyTorch has had since 2.8, are left out.
"$venv/bin/python" -m pytest -o filterwarnings=default --ignore tests/llm \
    --ignore tests/guard/frameworks --ignore tests/guard/distributed/test_checkpoint.py "$@"
