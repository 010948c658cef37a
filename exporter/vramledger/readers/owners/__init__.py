"""Find the owner of a holder: Slurm job, pod, container, systemd unit or user.

``cgroups`` reads the cgroup path, which the kernel attests, and needs no file; ``kubernetes.pod_names`` and
``containers`` find names in the files that the kubelet and the runtimes keep on the host; ``resolver`` puts
them in order; ``ended`` notices when an owner is gone; ``reader`` does all that without ever waiting.
"""
