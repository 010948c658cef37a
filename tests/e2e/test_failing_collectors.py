"""Whatever a source of facts raises, and however long it takes, only its own figures are missing."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from tests.support.certificates import Authority
from tests.support.exporter import Exporter, Labels, Page, entries, environment, serving
from tests.support.kubelet import allocatable, devices, kubelet, listed, pod
from tests.support.kubernetes_api import write_account
from tests.support.players.stage import Stage
from tests.support.pod_lists import listed_pod, serve_pods
from tests.support.standin.library import GIB, StandIn
from tests.support.vllm_server import metrics_page, serve_vllm
from vramledger.config import ALWAYS_COLLECTED, COLLECTORS
from vramledger.kubernetes.kubelet import SOCKET

FAULTS = Path(__file__).parents[1] / "support" / "injected_faults"
READERS = "vramledger.readers"
HOSTS = f"{READERS}.hosts"


class Fault(NamedTuple):
    """A function that fails, its collector, and a pattern for the families that this costs."""

    collector: str
    function: str
    lost: str = ""


OF_ROWS = "device_memory_bytes|process_(state|kv_cache|last|busy|orphan).*|owner_.*|pod_labels_info"
"""What says of a holder more than that it is there: nothing is known without its row."""

IN_THREADS = (f"{HOSTS}.host:Host.facts", f"{READERS}.owners.reader:resolve_owner")
"""What collectors do in threads of their own for each holder."""

RAISING = (
    Fault("process", "vramledger.sampling.holder_watch:RowReader.read", OF_ROWS),
    Fault("facts", "vramledger.sampling.holder_watch:FactsWatch.read"),
    Fault("owner", f"{READERS}.owners.reader:OwnerReader.read"),
    Fault("limits", "vramledger.sampling.holder_watch:LimitWatch.read"),
    Fault("limits", f"{READERS}.nvml.memory:LimitReader.read"),
    Fault("managed", f"{HOSTS}.managed_memory:ManagedMemoryReader.read"),
    Fault("cpu", "vramledger.sampling.holder_watch:CpuTimes.read"),
    Fault("waits", f"{HOSTS}.driver_waits:DriverWaitSearch.read"),
    Fault("threads", f"{HOSTS}.thread_times:ThreadTimesReader.read"),
    Fault("threads", f"{HOSTS}.thread_times:ThreadTimesReader.work_between"),
    Fault("waits", f"{HOSTS}.driver_waits:DriverWaitSearch.work_between"),
    Fault("hidden", f"{HOSTS}.hidden_holders:HiddenSearch.read", "device_hidden_holders|unreadable_.*"),
    Fault("reservations", f"{READERS}.schedulers.reader:SchedulerReader.read", ".*(reservation|reserved).*"),
    Fault("pods", "vramledger.kubernetes.pods:PodLabelReader.read", "pod_labels_info"),
    Fault("xid", "vramledger.sampling.device_threads:XidWatch.read"),
    Fault("vllm", f"{READERS}.vllm:KvCacheReader.read", "process_kv_cache_.*"),
    Fault("vllm", f"{READERS}.vllm:parse_figures", "process_kv_cache_.*"),
    Fault("vllm", "vramledger.accounting.tracker:_join", "process_kv_cache_.*"),
    Fault("ties", f"{HOSTS}.ties:TiesReader.read"),
    Fault("hardware", "pynvml:nvmlDeviceGetPowerUsage", "device_power_watts"),
    Fault("hardware", f"{READERS}.nvml.device_reader:read_utilization", "device_.*utilization_ratio"),
    Fault("process", f"{READERS}.nvml.utilization:UtilizationLog.read"),
    Fault("agent", "vramledger.agent_server.server:AgentServer.add_agents", "agent_.*"),
)


class Site(NamedTuple):
    """A running exporter whose functions can be made to fail, and what it watches."""

    exporter: Exporter
    orders: Path
    standin: StandIn
    stage: Stage
    holders: list[tuple[int, int]]

    @contextmanager
    def failing(self, function: str, how: str = "raise") -> Iterator[None]:
        """Have a function raise an error, or hang, until the block ends."""
        (self.orders / f"{function}.new").write_text(how, encoding="utf-8")
        (self.orders / f"{function}.new").rename(self.orders / function)
        try:
            yield
        finally:
            (self.orders / function).unlink()

    def when_settled(self) -> Page:
        return self.exporter.until(_is_settled, "all figures")

    def when_failed(self, collector: str) -> Page:
        return self.exporter.until(lambda page: collector in page.failing, "the failure")


@pytest.fixture(scope="module")
def site(standin_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run an exporter with every collector that this host can have, until all figures are there."""
    place = tmp_path_factory.mktemp("site")
    orders = place / "orders"
    orders.mkdir()
    (orders / "functions").write_text(
        "\n".join({*(each.function for each in RAISING), *IN_THREADS}), encoding="utf-8"
    )
    with ExitStack() as stack:
        standin = stack.enter_context(StandIn(place, standin_library))
        stage = stack.enter_context(Stage())
        rootfs = Path(stack.enter_context(TemporaryDirectory(prefix="v")))
        server = stack.enter_context(serve_vllm(place / "server"))
        server.say(metrics_page(0.03125, GIB, 412_000))
        idle = stage.start()
        holders = [(server.engine, 40 * GIB), (idle.pid, GIB)]
        standin.device(0).set_processes(holders)
        given = listed(pod("train-0", devices("nvidia.com/gpu", standin.device(0).uuid)))
        stack.enter_context(
            kubelet(rootfs / SOCKET, List=lambda _: given, GetAllocatableResources=lambda _: allocatable())
        )
        authority = Authority(place)
        train = listed_pod("train-0", {"team": "vision"})
        pods = stack.enter_context(serve_pods(authority.sign("kubelet"), train))
        flags = (
            *("--sample.interval=100ms", "--sample.timeout=2s", "--collector.vllm", "--collector.pcie"),
            *(f"--path.rootfs={rootfs}", "--pods.labels=team", "--pods.node=gpu-7"),
            f"--pods.kubelet=127.0.0.1:{pods.port}",
            f"--pods.credentials={write_account(place / 'account', authority.pair)}",
        )
        driver = {**standin.env(), "INJECTED_FAULTS": str(orders)}
        driver["PYTHONPATH"] = os.pathsep.join([str(FAULTS), environment({})["PYTHONPATH"]])
        exporter = stack.enter_context(serving(*flags, driver=driver))
        found = Site(exporter, orders, standin, stage, holders)
        exporter.until(_is_settled, "all figures")
        yield found


def _is_settled(page: Page) -> bool:
    wanted = ("process_kv_cache_bytes", "pod_labels_info", "device_hidden_holders", "agent_socket_up")
    return all(page.values(name) for name in wanted) and not page.failing


def _series(page: Page) -> set[tuple[str, Labels]]:
    """Return the series that a sample has, beside those that come with the work of the moment."""
    kinds = "device|process|owner|agent|pod|reservation|reserved|unreadable|up|collector"
    own = re.compile(f"vramledger_({kinds})")
    return {key for key in page.samples if own.match(key[0])}


def _lost(before: Page, after: Page, fault: Fault) -> set[str]:
    """Return the families that a fault has cost; no other may be missing."""
    lost = {name.removeprefix("vramledger_") for name, _ in _series(before) - _series(after)}
    assert {name for name in lost if not re.fullmatch(fault.lost, name)} == set()
    return lost


@pytest.mark.repeats(kept=10)
@pytest.mark.parametrize(
    "fault", RAISING, ids=lambda each: f"{each.collector}-{each.function.rpartition(':')[2]}"
)
def test_an_error_costs_a_collector_its_own_figures(site: Site, fault: Fault) -> None:
    """The others go on, success is 0, one line is logged, and the next good sample has all again."""
    before = site.when_settled()
    logged = len(entries(site.exporter.log))
    with site.failing(fault.function):
        site.when_failed(fault.collector)
        pages = [site.exporter.next_sample() for _ in range(3)]
        errors = [each for each in entries(site.exporter.log)[logged:] if each["level"] == "error"]
    assert all(page.up for page in pages)
    assert bool(_lost(before, pages[-1], fault)) == bool(fault.lost)
    assert [each["err"] for each in errors] == ["RuntimeError: injected"]
    states = pages[-1].labels("process_state_since_timestamp_seconds", "state")
    assert not {"dead", "zombie", "stuck", "orphaned"} & states
    assert _series(before) <= _series(site.when_settled())


HANGING = [each for each in RAISING if each.function.endswith(".read") and ".nvml." not in each.function]
"""Queries of a GPU have their own deadline."""


@pytest.mark.parametrize("fault", HANGING, ids=lambda each: each.function.rpartition(":")[2])
@pytest.mark.repeats(kept=3)
def test_a_collector_that_hangs_loses_its_own_figures(site: Site, fault: Fault) -> None:
    """A sample waits for it once; nobody restarts the sampler."""
    before, sampler = site.when_settled(), site.exporter.sampler.pid
    with site.failing(fault.function, "hang"):
        site.when_failed(fault.collector)
        page = site.exporter.next_sample()
        assert page.up
        _lost(before, page, fault)
    assert _series(before) <= _series(site.when_settled())
    assert site.exporter.sampler.pid == sampler


def test_every_collector_is_made_to_fail_here() -> None:
    """A new collector needs a fault above; what only the exporter measures is tested with the exposition."""
    elsewhere = {"exporter", "ledger", "energy", "pcie"}  # the last three are queries too
    assert {each.collector for each in RAISING} | elsewhere == COLLECTORS.keys() | ALWAYS_COLLECTED.keys()


def test_holders_without_rows_are_unknown(site: Site) -> None:
    """When /proc cannot be read nobody is dead, and nobody is forgotten."""
    page = site.when_settled()
    pids = {int(pid) for pid in page.labels("process_memory_bytes", "pid")}
    states = {pid: page.state(pid) for pid in pids}
    with site.failing("vramledger.sampling.holder_watch:RowReader.read"):
        page = site.when_failed("process")
        assert {page.state(pid) for pid in pids} == {"unknown"}
    page = site.when_settled()
    assert {pid: page.state(pid) for pid in pids} == states


@pytest.mark.parametrize(
    ("function", "collector"),
    [
        ("vramledger.sampling.holder_watch:FactsWatch.read", "facts"),
        (f"{HOSTS}.host:Host.facts", "facts"),
        (f"{READERS}.owners.reader:OwnerReader.read", "owner"),
        (f"{READERS}.owners.reader:resolve_owner", "owner"),
    ],
)
def test_a_holder_that_comes_meanwhile_is_known_afterwards(site: Site, function: str, collector: str) -> None:
    """Nobody is charged or blamed for its memory until its facts and its owner are read."""
    site.when_settled()
    device = site.standin.device(0)
    newcomer = site.stage.start()
    with site.failing(function):
        device.set_processes([*site.holders, (newcomer.pid, 2 * GIB)])
        site.when_failed(collector)
        for _ in range(3):
            page = site.exporter.next_sample()
        if not function.endswith("resolve_owner"):  # its cgroup alone says the type, as while names are late
            assert page.labels("process_info", "owner_type", pid=newcomer.pid) <= {"", "unknown"}
        assert page.state(newcomer.pid) == "active"
    page = site.exporter.until(
        lambda page: page.labels("process_info", "owner_type", pid=newcomer.pid) - {"", "unknown"}, "it"
    )
    assert page.labels("process_info", "user", pid=newcomer.pid) - {""}
    device.set_processes(site.holders)


def test_an_xid_error_is_not_lost(site: Site) -> None:
    """What comes while the collector fails is counted with the next good sample."""

    def count(page: Page) -> float:
        return sum(page.values("device_xid_errors_total").values())

    before = count(site.when_settled())
    with site.failing("vramledger.sampling.device_threads:XidWatch.read"):
        site.when_failed("xid")
        site.standin.xid(31)
        site.exporter.next_sample()
    site.exporter.until(lambda page: count(page) == before + 1, "the error")
