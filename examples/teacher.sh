#!/usr/bin/env bash
# On-policy distillation: a student with other random weights learns its teacher's 16 likeliest tokens at each place of
# its own replies. The teacher lives on a pool of its own.
#
#   bash examples/teacher.sh [key=value …]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash install.sh quickstart
exec .venv/bin/spmd-rl train --nproc 2 experiment=tiny trainer.output_dir=outputs/teacher \
    model.random_init=true model.seed=7 pools.teacher.n_gpus_per_node=1 teacher.pool=teacher \
    teacher.enable=true teacher.path=tiny-digits teacher.top_k=16 teacher.reward_weight=0 "$@"
