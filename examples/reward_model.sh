#!/usr/bin/env bash
# A reward model (a sequence classifier with random weights, made on the spot) scores the replies, on a pool of its own.
#
#   bash examples/reward_model.sh [key=value …]
#
# A generative judge instead: reward.model.kind=judge, and reward.model.path names a causal LM.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash install.sh quickstart
exec .venv/bin/spmd-rl train --nproc 2 experiment=tiny trainer.output_dir=outputs/reward_model \
    pools.reward.n_gpus_per_node=1 reward.model.pool=reward reward.model.enable=true \
    reward.model.path=tiny-classifier reward.functions=[last_number] "$@"
