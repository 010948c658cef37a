"""Which devices a scheduler has reserved for whom: kubelet, Slurm, Nomad; each read only where it is.

``kubelet`` asks the pod-resources socket by ``unary``'s single gRPC call; ``jobs`` reads what Slurm and Nomad
have put into the environment of the processes below their cgroups; ``reader`` does that at a slow pace, and
no sample ever waits for it. What a reservation means beside who holds memory is ``reservations``' part.
"""
