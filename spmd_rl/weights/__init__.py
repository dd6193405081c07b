"""Weight sync: from the shards that the actor's ranks hold to the slices that a rollout engine holds.

`held.py` says what a rank holds, `trace.py` learns it from a foreign loader, `table.py` computes once what goes where,
`sync.py` moves it, and `copies.py` (with `copy_kernels.py` on CUDA) copies many slices at once and proves them.
"""
