"""Within a service of several users, a person is the owner of what is the person's."""

from pathlib import Path

import pytest

from tests.support.procs import FakeProc, known, proc
from tests.support.sure import sure
from tests.support.waiting import PATIENCE
from vramledger.model.reading import Owner, ProcessFacts
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners.host_files import HostFiles
from vramledger.readers.owners.reader import LOOK_AGAIN, OwnerReader, UnitUsers, resolve_owner

__all__ = ["proc"]

ANN, BOB, DAEMON = 1001, 200_000, 990
HUB = "/system.slice/jupyterhub.service"


class Service:
    """Processes in cgroups, and the owners that they have."""

    def __init__(self, proc: FakeProc) -> None:
        """Begin with an init."""
        self.now = 0.0
        self.proc = proc
        self.host = Host(proc.root)
        self.units = UnitUsers(self.host, clock=lambda: self.now)

    def add(self, pid: int, uid: int, cgroup: str = HUB) -> ProcessFacts:
        """Start a process of a user."""
        row = self.proc.add(pid, status=b"Uid:\t%d\t%d\t%d\t%d\n" % (uid, uid, uid, uid))
        (self.proc.root / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")
        return known(self.host.facts(row))

    def owner(self, facts: ProcessFacts) -> tuple[str, str, str]:
        """Return type, name and unit of a process' owner."""
        owner = sure(resolve_owner(HostFiles(self.proc.root), facts, is_shared=self.units.is_shared).owner)
        return owner.type, owner.name, owner.unit


@pytest.fixture
def service(proc: FakeProc) -> Service:
    """Return a host with an init alone."""
    return Service(proc)


@pytest.mark.parametrize("daemon", [0, DAEMON, BOB])
@pytest.mark.parametrize("below", [HUB, f"{HUB}/user-ann", "/hubs.slice/hubs-a.slice/condor.service"])
def test_a_person_is_the_owner_in_a_daemons_service(service: Service, daemon: int, below: str) -> None:
    """A daemon starts people's programs in its own service: each person owns what is theirs."""
    unit = next(part for part in below.split("/") if part.endswith(".service"))
    service.add(40, daemon, below.partition(".service")[0] + ".service")
    ann = service.add(41, ANN, below)
    assert service.owner(ann) == ("user", str(ANN), unit)


@pytest.mark.parametrize("uids", [(ANN, ANN), (0, 0), (0, DAEMON), (0, 65534), (0, 61500), (DAEMON, DAEMON)])
def test_a_service_that_is_one_program_is_the_owner(service: Service, uids: tuple[int, int]) -> None:
    """A service of one person, and one that gives up root for a user of its own, is the owner itself."""
    service.add(40, uids[0])
    assert service.owner(service.add(41, uids[1])) == ("unit", "jupyterhub.service", "jupyterhub.service")


def test_who_is_elsewhere_does_not_count(service: Service) -> None:
    """Users of other services do not count, whatever their names have in common."""
    for pid, place in enumerate(("/", f"{HUB}d", "/system.slice", f"/user.slice/x{HUB}"), start=50):
        service.add(pid, 0, place)
    assert service.owner(service.add(41, ANN))[0] == "unit"


def test_a_second_user_is_noticed_and_not_forgotten(service: Service) -> None:
    """A service that gets a second user has several from then on, also when the first program has ended."""
    ann = service.add(41, ANN)
    assert service.owner(ann)[0] == "unit"
    bob = service.add(42, BOB)
    service.now += LOOK_AGAIN
    assert [service.owner(each)[1] for each in (ann, bob)] == [str(ANN), str(BOB)]
    service.add(42, ANN)
    service.now += LOOK_AGAIN
    assert service.owner(ann)[1] == str(ANN)


def test_the_programs_of_a_session_or_a_job_are_what_they_were(service: Service) -> None:
    """Only a service is shared: a scope is of who started it, and a container or a job goes before."""
    service.add(40, 0, "/system.slice/run-1.scope")
    assert service.owner(service.add(41, ANN, "/system.slice/run-1.scope"))[0] == "unit"
    job = "/system.slice/slurmstepd.scope/job_17/step_0"
    service.add(42, 0, job)
    assert service.owner(service.add(43, ANN, job))[:2] == ("slurm", "17")


def test_the_sampler_asks_for_it(service: Service, tmp_path: Path) -> None:
    """The facts of a sample have the person as the owner, and the unit beside."""
    service.add(40, 0)
    ann = service.add(41, ANN)
    reader = OwnerReader(service.host, tmp_path)
    (found,) = reader.add_owners([ann], timeout=PATIENCE)
    assert found.owner == Owner("user", str(ANN), unit="jupyterhub.service")
