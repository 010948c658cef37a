"""What the host says about processes: the only package that reads /proc.

``stat`` is read at every sample, ``facts`` once for a process, ``hidden`` at a slow pace; ``guard`` runs
what may hang. psutil is not used at run time: it needs 46 µs for what one read of ``/proc/PID/stat``
gives in 8 (both measured, see ``stat``), and it hides the difference between gone and denied that we
report. The tests check our rows against it.

It imports nothing: the exporter needs a little of it only, and keeps what it has once loaded.
"""
