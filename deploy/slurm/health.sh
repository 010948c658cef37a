#!/bin/bash
# Slurm HealthCheckProgram: drain a node whose GPUs do not answer, and resume it when they answer again.
exec "${BASH_SOURCE[0]%/*}/hook.sh" health
