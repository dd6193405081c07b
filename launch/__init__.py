"""Starting a run: one `LaunchSpec` from the config, rendered for torchrun, for Slurm (submitit) and for torchx.

A checkout's `launch/` and a wheel's `spmd_rl/_launch` are the same package, `spmd_rl._launch`.
"""
