"""What the host says about processes: the only package that reads /proc.

``stat`` is read at every sample, ``facts`` once for a process, ``hidden_holders`` at a slow pace;
``readers.bounded`` runs what may hang. CONTRIBUTING.md has the measurements by which psutil reads some facts
and we others; the tests check our rows against it.

It imports nothing: the exporter needs a little of it only, and keeps what it has once loaded.
"""
