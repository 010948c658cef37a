"""Recordings of real GPUs: the situations that were planted, and what each of them must be judged as."""
