"""`spmd-rl doctor`: is this place fit for a job? On one host, or on all ranks through the launcher that it will use:

    spmd-rl doctor
    torchrun --nnodes 2 … -m spmd_rl.doctor [experiment=… key=value …]
    srun python -m spmd_rl.doctor …

Every rank looks at its host, its device, its clock and its way to the others; then they meet, compare, sum and send.
One table, red lines first. Exit status 1 with a red line, 2 for a mistake in the arguments. With arguments of a run its
plan and its trainer.output_dir are checked, too.
"""

from spmd_rl.doctor.examine import main

__all__ = ["main"]
