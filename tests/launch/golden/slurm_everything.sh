#!/bin/bash

# Parameters
#SBATCH --account=lab
#SBATCH --array=0-4%1
#SBATCH --constraint=h100
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=tiny
#SBATCH --mem=921600MB
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/run/slurm/%A_%a_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --reservation=r1
#SBATCH --signal=USR2@180
#SBATCH --time=720

# setup
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
export SPMD_RL_ATTEMPT=/shared/run/slurm/$job.attempts/${SLURM_RESTART_COUNT:-0}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + (SLURM_JOB_ID + ${SLURM_RESTART_COUNT:-0}) % 20000))
trap : TERM  # a polite end is for the tasks; this script goes on to the end of it
export OMP_NUM_THREADS=12
export NCCL_DEBUG=WARN

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /shared/run/slurm/%A_%a_%t_log.out --open-mode=append --kill-on-bad-exit=1 --cpus-per-task=96 --container-image=/images/rl.sqsh --container-mounts=/data:/data:ro --mpi=none /opt/python -u -m submitit.core._submit /shared/run/slurm


# teardown
status=$?
again=
if [[ -d $SPMD_RL_ATTEMPT/errors ]]; then
    { PYTHON -m spmd_rl.cli launch --failure "$SPMD_RL_ATTEMPT" || cat "$SPMD_RL_ATTEMPT"/errors/*; } | tee "$SPMD_RL_ATTEMPT/failure.txt"
    mv "$SPMD_RL_ATTEMPT/failure.txt" "/shared/run/slurm/$job.failure.txt"
    failed=$(find "/shared/run/slurm/$job.attempts" -name errors | wc -l)
    [[ $failed -le 2 ]] && again=1
elif [[ -e $SPMD_RL_ATTEMPT/interrupted ]]; then
    again=
fi
# A job that was cancelled, or that Slurm itself has queued again, is not RUNNING any more.
if [[ -n $again && $(squeue --noheader --job "$SLURM_JOB_ID" --format %T | head -n 1) == RUNNING ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
# To be read: the srun line loads what `spmd-rl launch` pickles when it submits. One to change: launch/job.sbatch
# every task runs: /opt/python -m spmd_rl.torchrun --nnodes 4 --node-rank '$SLURM_NODEID' --master-addr '$MASTER_ADDR' --master-port '$MASTER_PORT' --nproc-per-node '$SPMD_RL_RANKS' -m spmd_rl.train experiment=tiny trainer.output_dir=/shared/run cluster.python=/opt/python cluster.nodes=4 cluster.gpus_per_node=8 'cluster.node_tags=[h100,h100,h100,h100]' cluster.time_h=12 cluster.account=lab cluster.partition=gpu cluster.qos=high cluster.cpus_per_rank=12 cluster.memory_gib=900 cluster.exclusive=true cluster.retries=2 cluster.links=5 cluster.srun=node 'cluster.sbatch={reservation: r1}' 'cluster.srun_args=['"'"'--mpi=none'"'"']' 'cluster.env={NCCL_DEBUG: WARN}' cluster.image=/images/rl.sqsh 'cluster.mounts=['"'"'/data:/data:ro'"'"']'
