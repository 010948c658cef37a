"""Which devices a scheduler has reserved for whom: kubelet, Slurm, Nomad; each read only where it is.

``kubelet`` reads the pod-resources socket by ``grpc_call``; ``batch_jobs`` reads what Slurm and Nomad
have put into the environment of the processes below their cgroups; ``reader`` does that at a slow pace, and
no sample ever waits for it. What a reservation means beside who holds memory is ``reservations``' part.
"""
