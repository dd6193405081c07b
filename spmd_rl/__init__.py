"""spmd_rl: RL post-training of language models as one SPMD program that every rank runs."""

__version__ = "0.1.0"
