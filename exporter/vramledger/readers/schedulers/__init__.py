"""Read which devices a scheduler has reserved for whom: kubelet, Slurm, Nomad; each only if present.

``kubernetes.kubelet`` reads the pod-resources socket. ``batch_jobs`` reads what Slurm and Nomad have put into
the environment of the processes in their jobs' cgroups. ``reader`` does that at a slow pace, and no sample
ever waits for it.
"""
