"""Slurm: which jobs run here and what they were given, the verdict for its scripts, their command."""
