#!/usr/bin/env bash
# One run with torchrun: as many ranks as this host has GPUs (or NPROC), on one host or on several.
#
#   bash launch/torchrun.sh [--dry-run] experiment=gsm8k model.path=… key=value …
#
# Several hosts: the same line on each of them, with NNODES, and MASTER_ADDR as the first host's address.
#   NNODES=2 MASTER_ADDR=10.0.0.1 bash launch/torchrun.sh experiment=gsm8k model.path=… …
set -euo pipefail

dry_run=
if [[ ${1:-} == --dry-run ]]; then
    dry_run=1
    shift
fi

nproc=${NPROC:-}
if [[ -z $nproc ]]; then
    nproc=$( (command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus | wc -l) || echo 1)
fi

if [[ ${NNODES:-1} -gt 1 ]]; then
    : "${MASTER_ADDR:?NNODES=$NNODES needs MASTER_ADDR, the address of the first host}"
    meeting=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}"
        --rdzv-id "${RUN_ID:-spmd_rl}")
else
    meeting=(--standalone)
fi

# The torchrun of the active environment, else that of the checkout.
command=(torchrun "${meeting[@]}" --nproc-per-node "$nproc" -m spmd_rl.train "$@")
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if ! command -v torchrun >/dev/null && [[ -x $checkout/.venv/bin/torchrun ]]; then
    command[0]=$checkout/.venv/bin/torchrun
fi

printf '%q ' "${command[@]}"
printf '\n'
[[ -n $dry_run ]] || exec "${command[@]}"
