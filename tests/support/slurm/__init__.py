"""A real Slurm on this machine: its daemons in their own namespaces, and the stand-in driver on its nodes."""
