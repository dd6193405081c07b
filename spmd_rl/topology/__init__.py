"""Pure: pools, layouts, the plan, memory and traffic estimates, rendering. No torch, no torch.distributed, no CUDA."""
