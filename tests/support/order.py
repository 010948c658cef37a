"""In which order the files of tests begin, and which of them stay together on one worker."""

from itertools import zip_longest
from pathlib import Path

SHARING = ("tests/integration/dashboards/answers",)
"""Folders whose files share servers that take long to start."""
SEEN = {"tests/integration/deploy/test_real_slurm.py": "tests/integration/deploy/test_slurm.py"}
"""Files whose programs another one would see: a container may belong to any job of the host."""

_WAITING = """
fleet/test_fleet e2e/test_storage accounting/test_states_real deploy/test_slurm
agent_server/test_hostile_peers browser/test_page e2e/test_failing_collectors agent/test_isolated
e2e/test_asking_exporter readers/hosts/test_hosts_real e2e/test_holders commands/test_end web/test_connections
serving/test_control_socket agent/test_life commands/test_check e2e/test_hanging web/test_prometheus
readers/owners/test_owners_real readers/hosts/test_ties agent/test_flight_recorder e2e/test_driver_trouble
browser/test_others e2e/test_frozen agent_server/test_server alerts/test_delivery commands/test_asking
commands/test_attach commands/test_why browser/test_past e2e/test_agents e2e/test_release
e2e/test_recording_trouble agent/test_pytorch serving/test_past_questions fuzz/test_http
readers/hosts/test_driver_waits serving/test_storage_start sampling/test_supervisor
readers/schedulers/test_batch_jobs
"""
_COMPUTING = """
faults/test_detection faults/test_recorded agent/test_undisturbed alerts/test_situations
alerts/test_many alerts/test_messages alerts/test_boundaries alerts/test_joins unit/storage/test_past_file
deploy/test_kubernetes faults/test_demo agent/test_signals e2e/test_commands e2e/test_privileges
alerts/test_rules commands/test_doctor alerts/test_figures e2e/test_report agent/test_versions
agent/test_equal e2e/test_who_may_ask e2e/test_hostile alerts/test_routes alerts/test_clock e2e/test_sources
e2e/test_fit
"""
"""What takes longest, measured with five workers on two cores, and of it what waits more than it computes.

They begin first, in turn: so one computes while others wait, and short ones are left for the end.
"""


def _file(name: str) -> str:
    path = f"tests/{'' if name.startswith(('e2e', 'unit')) else 'integration/'}{name}.py"
    assert (Path(__file__).parents[2] / path).exists(), path
    return path


PAIRS = zip_longest(_WAITING.split(), _COMPUTING.split())
LONG = [*SHARING, *(_file(name) for pair in PAIRS for name in pair if name)]


def unit_of(nodeid: str) -> str:
    """Return what stays together on one worker with a test: its file, another one, or a folder."""
    file = nodeid.partition("::")[0]
    file = SEEN.get(file, file)
    return next((folder for folder in SHARING if file.startswith(f"{folder}/")), file)
