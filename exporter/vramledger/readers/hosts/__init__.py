"""Read what the host says about processes; only this package reads /proc.

``stat`` is read at every sample, ``facts`` once for a process, ``hidden_holders`` at a slow pace;
``readers.collector`` runs what may hang. CONTRIBUTING.md has the measurements that decide which facts psutil
reads and which we read; the tests check our rows against psutil. It imports nothing: the exporter needs only
a little of it, and keeps what it has once loaded.
"""
