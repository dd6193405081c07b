#!/usr/bin/env bash
# Installs what the tests need and runs them. What this machine lacks (a GPU, Slurm, Chromium …) is skipped and listed.
#
#   bash tests/run.sh [pytest's own arguments]      e.g. tests/algorithms -k grpo
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash install.sh quickstart,dev
exec .venv/bin/python -m pytest "$@"
