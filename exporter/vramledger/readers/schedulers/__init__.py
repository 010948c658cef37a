"""Read which devices a scheduler has reserved for whom: kubelet, Slurm, Nomad; each only if present."""
