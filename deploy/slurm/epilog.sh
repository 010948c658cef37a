#!/bin/bash
# Slurm Epilog: end what the job has left, and drain the node if memory of its GPUs is not freed.
exec "${BASH_SOURCE[0]%/*}/hook.sh" epilog
