#!/usr/bin/env bash
# Installs what the tests need and runs them. What this machine lacks (a GPU, Slurm, Chromium …) is skipped and listed.
#
#   bash tests/run.sh [pytest's own arguments]      e.g. tests/algorithms -k grpo
#
# Without arguments all tests but those that bring up a cluster on this host, or wait for time-outs of real runs:
# bash tests/run.sh -m "slurm or netns or slow"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash install.sh quickstart,dev
[[ $# -gt 0 ]] || set -- -m "not (slurm or netns or slow)"
exec .venv/bin/python -m pytest "$@"
