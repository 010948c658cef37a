#!/bin/bash
# Slurm HealthCheckProgram: drain a node whose holders are not known, and resume it when they are known again.
PATH=${PATH:+$PATH:}/usr/local/bin:/usr/bin:/bin # slurmd sets none
node=${SLURMD_NODENAME:-$(hostname -s)}
mark="vramledger:"

verdict=$(vramledger check --allow-live --log.level=error 2>&1)
status=$?
reason=$(sinfo --noheader --node "$node" --format %E 2>/dev/null)

case $status in
0 | 1) # the state is known; it resumes only what this script itself drained
    if [[ $reason == "$mark"* ]]; then scontrol update NodeName="$node" State=RESUME; fi
    ;;
*) # it cannot, or is not installed
    if [[ $reason != "$mark"* ]]; then
        line=$(grep -m 1 'cannot tell' <<<"$verdict") || line=${verdict%%$'\n'*}
        scontrol update NodeName="$node" State=DRAIN Reason="$mark $line"
    fi
    ;;
esac
