#!/bin/bash
# Slurm Prolog: are the job's GPUs clean? A leftover drains the node and requeues the job (exit 1 does both).
PATH=${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin # slurmd sets none
gpus=${SLURM_JOB_GPUS:-${CUDA_VISIBLE_DEVICES:-}}
[ -n "$gpus" ] || exit 0 # the job has no GPU

arguments=()
for gpu in ${gpus//,/ }; do
    # Slurm counts the device files; NVML may count the GPUs in another order.
    if [[ -n ${SLURM_JOB_GPUS:-} && $gpu =~ ^[0-9]+$ ]]; then gpu=/dev/nvidia$gpu; fi
    arguments+=(--gpu "$gpu")
done

verdict=$(vramledger check --wait="${VRAMLEDGER_WAIT:-30s}" --log.level=error "${arguments[@]}" 2>&1)
status=$?
[ "$status" = 0 ] && exit 0
# One line for each GPU; sinfo -R must show one that is not clean.
line=$(grep -m 1 -E 'NOT CLEAN|cannot tell' <<<"$verdict") || line=${verdict%%$'\n'*}
if [ "$status" = 1 ]; then reason="GPU not clean: $line"; else reason="GPU unknown: $line"; fi
scontrol update NodeName="${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN Reason="$reason"
exit 1
