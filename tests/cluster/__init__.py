"""Several hosts on one: `Hosts` are network namespaces with names and addresses, `Slurm` is a real one on them."""
