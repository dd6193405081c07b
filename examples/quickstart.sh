#!/usr/bin/env bash
# A real language model learns sums by GRPO: two ranks on the CPU, five minutes, no model hub.
#
#   bash examples/quickstart.sh [key=value …]       e.g. trainer.seed=1 trainer.total_training_steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash install.sh quickstart
exec .venv/bin/spmd-rl train --nproc 2 experiment=quickstart "$@"
