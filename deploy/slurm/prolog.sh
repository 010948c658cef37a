#!/bin/bash
# Slurm Prolog: a leftover on the job's GPUs drains the node, and the job is requeued.
exec "${BASH_SOURCE[0]%/*}/hook.sh" prolog
