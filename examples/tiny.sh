#!/usr/bin/env bash
# The whole way in two minutes, on a model made from scratch: SFT until it gets some sums right, then GRPO on them.
#
#   bash examples/tiny.sh [key=value …]             the arguments go to GRPO, e.g. trainer.total_training_steps=100
#
# Validation samples like training does (4 replies a problem at temperature 1): that is what GRPO improves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-outputs/tiny}
bash install.sh quickstart
bin=.venv/bin

"$bin/spmd-rl" train --nproc 2 experiment=sft_tiny trainer.output_dir="$out/sft"
rm -rf "$out/warm"
"$bin/spmd-rl" export "$out/sft" "$out/warm" --dtype float32
"$bin/spmd-rl" train --nproc 2 experiment=tiny model.path="$out/warm" trainer.output_dir="$out/rl" \
    trainer.total_training_steps=40 trainer.test_freq=10 rollout.n=8 rollout.val_n=4 rollout.val_temperature=1.0 \
    data.train_batch_size=64 actor.ppo_mini_batch_size=64 actor.optim.lr=5e-4 \
    actor.engine.max_tokens_per_micro_batch=8192 "$@"
"$bin/spmd-rl" report "$out/rl"
