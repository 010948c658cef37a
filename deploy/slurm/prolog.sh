#!/bin/bash
# Slurm Prolog: are the job's GPUs clean? A leftover drains the node and requeues the job (exit 1 does both).
gpus=${SLURM_JOB_GPUS:-${CUDA_VISIBLE_DEVICES:-}}
[ -n "$gpus" ] || exit 0 # the job has no GPU

arguments=()
for gpu in ${gpus//,/ }; do arguments+=(--gpu "$gpu"); done

verdict=$(vramledger check --wait=30s --log.level=error "${arguments[@]}" 2>&1)
case $? in
0) exit 0 ;;
1) reason="GPU not clean: $verdict" ;;
*) reason="GPU unknown: $verdict" ;;
esac
# Slurm shows the reason in sinfo -R; the first line says it all.
scontrol update NodeName="${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN Reason="${reason%%$'\n'*}"
exit 1
