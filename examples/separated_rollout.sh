#!/usr/bin/env bash
# The rollout on a pool of its own: it samples step k + 1 while the actor trains on step k.
#
#   bash examples/separated_rollout.sh [key=value …]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash install.sh quickstart
exec .venv/bin/spmd-rl train --nproc 2 experiment=tiny trainer.output_dir=outputs/separated_rollout \
    pools.rollout.n_gpus_per_node=1 rollout.pool=rollout trainer.schedule=one_step_off "$@"
