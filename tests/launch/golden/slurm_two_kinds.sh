#!/bin/bash

# Parameters
#SBATCH --constraint=h100
#SBATCH --gpus-per-node=8
#SBATCH --job-name=tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=/shared/run/slurm/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@180
#SBATCH hetjob
#SBATCH --job-name=tiny
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --constraint=l40

# setup
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
export SPMD_RL_ATTEMPT=/shared/run/slurm/$job.attempts/${SLURM_RESTART_COUNT:-0}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + (SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 20000))
trap : TERM  # a polite end is for the tasks; this script goes on to the end of it

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /shared/run/slurm/%j_%t_log.out --open-mode=append --kill-on-bad-exit=1 --het-group=0,1 /opt/python -u -m submitit.core._submit /shared/run/slurm


# teardown
status=$?
again=
if [[ -d $SPMD_RL_ATTEMPT/errors ]]; then
    { PYTHON -m spmd_rl.cli launch --failure "$SPMD_RL_ATTEMPT" || cat "$SPMD_RL_ATTEMPT"/errors/*; } | tee "$SPMD_RL_ATTEMPT/failure.txt"
    mv "$SPMD_RL_ATTEMPT/failure.txt" "/shared/run/slurm/$job.failure.txt"
    failed=$(find "/shared/run/slurm/$job.attempts" -name errors | wc -l)
    [[ $failed -le 0 ]] && again=1
elif [[ -e $SPMD_RL_ATTEMPT/interrupted ]]; then
    again=1
fi
# A job that was cancelled, or that Slurm itself has queued again, is not RUNNING any more.
if [[ -n $again && $(squeue --noheader --job "$SLURM_JOB_ID" --format %T | head -n 1) == RUNNING ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
# To be read: the srun line loads what `spmd-rl launch` pickles when it submits. One to change: launch/job.sbatch
# every task runs: /opt/python -u -m spmd_rl.train experiment=tiny trainer.output_dir=/shared/run cluster.python=/opt/python cluster.nodes=3 'cluster.gpus_per_node=[8,8,4]' 'cluster.node_tags=[h100,h100,l40]'
