"""Does a snapshot on the agent's thread import parts of PyTorch? ``python -m tests.tools.gpu.imports``.

Programs with a recording from the start hold memory for some seconds, and then make their first optimizer,
which imports much of PyTorch. In ``unguarded`` the agent's own guard is turned off. Tells which threads have
imported ``torch._inductor``, and how the program ended. Half a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.listening import PROJECT, STARTUP, FakeExporter

PROGRAM = """
import json, sys, threading, time
threads = []
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._inductor":
            ours = threading.current_thread() is not threading.main_thread()
            threads.append("another" if ours else "the program's")
sys.meta_path.insert(0, Finder())
import torch
from vramledger.agent.torch import block_survey
if sys.argv[1] == "unguarded":
    block_survey.take_without_import = lambda torch, take: take()
kept = torch.nn.Linear(2048, 2048).cuda()
time.sleep(float(sys.argv[2]))
try:
    torch.optim.AdamW(kept.parameters())
    ended = "well"
except ImportError as error:
    ended = str(error)
print(json.dumps({"threads": threads, "ended": ended}), flush=True)
"""


def main() -> int:
    """Run the programs side by side; 1 when one with the agent as it is did not end well."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="vl-") as directory, FakeExporter(Path(directory, "a")) as heard:
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(STARTUP), str(PROJECT)]),
            "VRAMLEDGER_AGENT": "1",
            "VRAMLEDGER_AGENT_SOCKET": str(heard.path),
            "VRAMLEDGER_AGENT_REPORTS": directory,
            "VRAMLEDGER_AGENT_SNAPSHOT_FROM_START": "1",
        }
        running = {
            (guard, seconds): subprocess.Popen(
                [sys.executable, "-c", PROGRAM, guard, str(seconds)], env=environ, cwd=directory, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for guard in ("guarded", "unguarded")
            for seconds in (0.5, 1.5, 2.2, 2.6, 3.0, 5.0)
        }  # fmt: skip
        for (guard, seconds), process in running.items():
            out, errors = process.communicate(timeout=80)
            told = json.loads(out.splitlines()[-1]) if out else {"ended": errors[-500:]}
            bad = guard == "guarded" and (told["ended"] != "well" or "another" in told["threads"])
            failed += bad
            print(f"{'MISSED' if bad else 'met'}: {guard}, optimizer after {seconds} s: {told}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
