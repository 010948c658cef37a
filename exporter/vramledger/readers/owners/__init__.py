"""Who answers for a holder: pod, container, Slurm job, notebook, systemd unit or user.

``cgroups`` reads the kernel's own word for where a process belongs and needs no file, with the names
that ``slurm`` and ``systemd`` know; ``kubernetes`` and ``containers`` find names in what the kubelet and the
runtimes keep on the host; ``resolver`` puts them in order; ``ended`` tells when an owner is gone; ``reader``
does all that without ever waiting.
"""
