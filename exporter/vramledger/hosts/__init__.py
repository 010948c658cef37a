"""What the host says about processes: the only package that reads /proc.

``stat`` is read at every sample, ``facts`` once for a process, ``hidden`` at a slow pace; ``guard`` runs
what may hang. psutil is not used at run time: it needs 46 µs for what one read of ``/proc/PID/stat``
gives in 8 (both measured, see ``stat``), and it hides the difference between gone and denied that we
report. The tests check our rows against it.
"""

from __future__ import annotations

from vramledger.hosts.hidden import HiddenSearch, hidden_now
from vramledger.hosts.host import Host
from vramledger.hosts.libraries import tells
from vramledger.hosts.names import program_name
from vramledger.hosts.reader import FactsReader

__all__ = ["FactsReader", "HiddenSearch", "Host", "hidden_now", "program_name", "tells"]
