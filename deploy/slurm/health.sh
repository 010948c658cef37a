#!/bin/bash
# Slurm HealthCheckProgram: drain a node that cannot tell who holds its GPUs, and resume it when it can again.
node=${SLURMD_NODENAME:-$(hostname -s)}
mark="vramledger:"

verdict=$(vramledger check --allow-live --log.level=error 2>&1)
status=$?
reason=$(sinfo --noheader --node "$node" --format %E 2>/dev/null)

if [ "$status" = 3 ] && [[ $reason != "$mark"* ]]; then
    scontrol update NodeName="$node" State=DRAIN Reason="$mark ${verdict%%$'\n'*}"
elif [ "$status" != 3 ] && [[ $reason == "$mark"* ]]; then
    scontrol update NodeName="$node" State=RESUME # only what this script drained itself
fi
