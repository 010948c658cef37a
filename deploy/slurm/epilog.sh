#!/bin/bash
# Slurm Epilog: end what the job left behind on its GPUs, and drain the node if the memory is not freed.
PATH=${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin # slurmd sets none
gpus=${SLURM_JOB_GPUS:-${CUDA_VISIBLE_DEVICES:-}}
[ -n "$gpus" ] || exit 0

arguments=()
for gpu in ${gpus//,/ }; do
    # Slurm counts the device files; NVML may count the GPUs in another order.
    if [[ -n ${SLURM_JOB_GPUS:-} && $gpu =~ ^[0-9]+$ ]]; then gpu=/dev/nvidia$gpu; fi
    arguments+=(--gpu "$gpu")
done

# It selects by owner, so that it never ends another job's process on a shared node, or one with a reused pid.
vramledger end --owner "slurm:${SLURM_JOB_ID:?}" "${arguments[@]}" --state orphaned --state zombie --state stopped \
    --working --grace=10s --yes --log.level=error >/dev/null 2>&1

verdict=$(vramledger check --wait="${VRAMLEDGER_WAIT:-30s}" --allow-live --log.level=error "${arguments[@]}" 2>&1) &&
    exit 0
line=$(grep -m 1 -E 'NOT CLEAN|cannot tell' <<<"$verdict") || line=${verdict%%$'\n'*}
scontrol update NodeName="${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN \
    Reason="GPU not clean after job $SLURM_JOB_ID: $line"
exit 0 # a failing epilog would drain the node with a reason that says less
