"""The page: the bytes that prometheus_client would write, in both formats, and only what was requested."""

import gzip
import json
import logging
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import vramledger
from tests.support.builders import HARDWARE, crowd, device, failed, holding, process, rich_host, snapshot
from vramledger.config import COLLECTORS, Config
from vramledger.errors import UsageError
from vramledger.metrics import devices, hardware, sampling
from vramledger.metrics.contract import FAMILIES, collectors
from vramledger.metrics.exposition import (
    Exposition,
    ScrapeRequest,
    format_number,
    gzip_accepted,
    label_value,
    negotiate_format,
    select_collectors,
)
from vramledger.metrics.families import SAMPLING, Collected, Family, Sample
from vramledger.metrics.sampling import revision
from vramledger.model.records import LABEL_VALUE_MAX
from vramledger.model.snapshot import Snapshot

ALL = frozenset(COLLECTORS)
OURS = ALL - {"exporter"}


def exposition() -> Exposition:
    """Make an exposition that takes no time, without a sampler."""
    return Exposition(0, lambda: None, clock=lambda: 0.0)


def render(shot: Snapshot, want: ScrapeRequest) -> str:
    """Render one snapshot with a new exposition."""
    return exposition().render(shot, want).decode()


def parsed(page: str) -> list[Metric]:
    """Read an OpenMetrics page with prometheus_client's strict parser."""
    return list(parse_openmetrics(page))  # type: ignore[no-untyped-call]


class Theirs(Collector):
    """The same families as prometheus_client's own objects."""

    def __init__(self, collected: Collected) -> None:
        self._collected = sorted((each for each in collected if each[1]), key=lambda each: each[0].name)

    def collect(self) -> Iterable[Metric]:
        for family, samples in self._collected:
            metric = Metric(family.base, family.help, family.kind, family.unit)
            for labels, value in samples:
                metric.add_sample(family.name, dict(zip(family.labels, labels, strict=True)), value)
            yield metric


def collected(shot: Snapshot) -> Collected:
    """Collect what a render of OURS shows."""
    health = {name: shot.collectors.get(name, (True, 0.0)) for name in sorted(OURS)} if shot.up else {}
    found = sampling.collect(shot, health)
    for collect in collectors(0).values():
        found += collect(shot)
    return found


HOSTILE = snapshot(
    device(0, [holding(7), holding(8)], name='H"200\\ \n{gpu="1"} 5 # é 漢 \U0001f4be', hardware=HARDWARE),
    processes=[process(7, user="a\nb", command='"} 1\n# EOF\n'), process(8, user="\\n", command="\\")],
)


@pytest.mark.parametrize(
    "shot", [crowd(2, 16), HOSTILE, failed(), Snapshot()], ids=["crowd", "hostile", "failed", "blank"]
)
def test_same_bytes_as_prometheus_client(shot: Snapshot) -> None:
    """Both formats are, byte for byte, what prometheus_client writes for the same samples."""
    theirs = Theirs(collected(shot))
    assert render(shot, ScrapeRequest(OURS)) == generate_latest(theirs).decode()
    expected = generate_openmetrics(theirs).decode()  # type: ignore[no-untyped-call]
    assert render(shot, ScrapeRequest(OURS, openmetrics=True)) == expected


@given(st.text(max_size=LABEL_VALUE_MAX))
@example('\\"\n\r\x00\u2028')
def test_any_label_value_is_written_as_prometheus_client_does(value: str) -> None:
    """For every label value, the line is what prometheus_client writes."""
    theirs = Theirs([(Family("m", ("l",), "h", "", "", ""), [((value,), 1)])])
    assert generate_latest(theirs).decode().split("\n", 2)[2] == f'm{{l="{label_value(value)}"}} 1.0\n'


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**64), 2**64) | st.booleans())
@example(0.000001)
@example(1e16)
@example(999999.5)
@example(1000000)
def test_any_number_is_written_as_prometheus_client_does(value: float) -> None:
    """A number has the same digits as in Go's and Python's clients."""
    assert format_number(value) == floatToGoString(value)  # type: ignore[no-untyped-call]


def test_what_utf8_cannot_hold_is_replaced_and_what_is_long_is_cut() -> None:
    """A name with undecodable bytes or of 64 KiB becomes legal and short, and the page is still valid."""
    shot = snapshot(
        device(0, [holding(7), holding(8)]),
        processes=[
            process(7, command=b"tr\xffain".decode(errors="surrogateescape")),
            process(8, command="x" * 65536),
        ],
    )
    page = render(shot, ScrapeRequest(OURS, openmetrics=True))
    info = next(family for family in parsed(page) if family.name == "vramledger_process")
    commands = {sample.labels["pid"]: sample.labels["command"] for sample in info.samples}
    assert commands == {"7": "tr\ufffdain", "8": "x" * (LABEL_VALUE_MAX - 1) + "…"}


@pytest.mark.parametrize("openmetrics", [False, True], ids=["text", "openmetrics"])
@pytest.mark.parametrize("shot", [crowd(2, 8), HOSTILE, failed()], ids=["crowd", "hostile", "failed"])
def test_the_whole_page_parses(shot: Snapshot, *, openmetrics: bool) -> None:
    """With the exporter's own metrics it is one legal exposition: no family twice, EOF once at the end."""
    # Any process can be the sampler here: our parent lives as long as we do.
    page = Exposition(0, os.getppid).render(shot, ScrapeRequest(ALL, openmetrics=openmetrics)).decode()
    names = [family.name for family in (parsed(page) if openmetrics else parse_text(page))]
    assert sorted(set(names)) == sorted(names)
    assert {"process_resident_memory_bytes", "vramledger_sampler_process_resident_memory_bytes"} <= set(names)
    assert "python_info" in names
    assert page.count("\n# EOF\n") == page.endswith("\n# EOF\n") == openmetrics


def test_a_series_comes_and_goes_with_its_number() -> None:
    """A series is absent while its value is not a number, and comes back with its next one."""
    family = devices.FAMILIES[0]
    turns: list[list[Sample]] = [
        [(("0", "a\rb"), first), (("1", "c\\"), second)]
        for first, second in ((1.0, 2.0), (1.0, float("nan")), (3.0, float("nan")), (3.0, 4.0), (3.0, 5.0))
    ]
    shown = iter(turns)
    used = Exposition(0, lambda: None, collect={"ledger": lambda _: [(family, next(shown))]})
    want = ScrapeRequest(frozenset({"ledger"}), frozenset({family.name}))
    for samples in turns:
        collected: Collected = [(family, samples)]
        fresh = Exposition(0, lambda: None, collect={"ledger": lambda _, kept=collected: kept})  # type: ignore[misc]
        assert used.render(failed(), want) == fresh.render(failed(), want)


def test_no_series_twice_and_no_value_that_is_no_number() -> None:
    """A repeated series counts once, by its last sample; NaN and the infinities are absent."""
    family = devices.FAMILIES[0]
    samples: list[Sample] = [(("0", "a"), 1.0), (("0", "a"), 2.0)]
    samples += [(("1", text), float(text)) for text in ("nan", "inf", "-inf")]
    odd = Exposition(0, lambda: None, collect={"ledger": lambda _: [(family, samples)]})
    page = odd.render(failed(), ScrapeRequest(frozenset({"ledger"}), frozenset({family.name}))).decode()
    assert page.splitlines()[2:] == [f'{family.name}{{gpu="0",uuid="a"}} 2.0']


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("openmetrics", [False, True])
def test_remembered_lines_never_show_an_old_value(*, openmetrics: bool, compressed: bool) -> None:
    """An exposition that rendered other snapshots and requests before gives the same page as a new one."""
    page, wanted = exposition(), ScrapeRequest(OURS, None, openmetrics, compressed)
    named = wanted._replace(names=frozenset({"vramledger_up"}))
    for shot in (*(crowd(2, 8, turn=turn) for turn in range(3)), crowd(1, 3), failed(), crowd(2, 8), HOSTILE):
        for request in (wanted, wanted, named, wanted, named, named):
            assert page.render(shot, request) == exposition().render(shot, request)


@pytest.mark.parametrize("openmetrics", [False, True])
def test_the_exporters_own_figures_are_new_in_each_page(*, openmetrics: bool) -> None:
    """A scrape of the same snapshot has the CPU time and memory of its own moment, in the usual lines."""
    shot, page = crowd(1, 2), Exposition(0, os.getpid)
    wanted = ScrapeRequest(ALL, None, openmetrics, compressed=True)
    name = "process_cpu_seconds_total "
    seconds = []
    for _ in range(3):
        text = gzip.decompress(page.render(shot, wanted)).decode()
        fresh = gzip.decompress(Exposition(0, os.getpid).render(shot, wanted)).decode()
        names, expected = ([line.split()[0] for line in each.splitlines()] for each in (text, fresh))
        assert names == expected
        seconds += [float(line.split()[1]) for line in text.splitlines() if line.startswith(name)]
        begun = time.process_time()
        while time.process_time() < begun + 0.02:
            pass
    assert seconds == sorted(set(seconds))


class Library(Collector):
    """What prometheus_client itself says of a process that is its own sampler."""

    def collect(self) -> Iterable[Metric]:
        ours, python = ProcessCollector(registry=None), PlatformCollector(registry=None)
        sampler = ProcessCollector("vramledger_sampler", os.getpid, registry=None)
        found = [*ours.collect(), *sampler.collect(), *python.collect()]
        return sorted(found, key=lambda metric: metric.name)


@pytest.mark.parametrize("openmetrics", [False, True])
def test_the_exporters_processes_are_written_as_by_prometheus_client(*, openmetrics: bool) -> None:
    """Names, texts and types are the library's, and the values are those of the same moment."""
    generate = generate_openmetrics if openmetrics else generate_latest
    ours_of = Exposition(0, os.getpid)
    ours_of.render(Snapshot(), ScrapeRequest(ALL))  # it keeps files open, which both count
    for _ in range(3):  # new lines, and those that are known
        theirs = generate(Library()).decode().splitlines()
        page = ours_of.render(Snapshot(), ScrapeRequest(frozenset({"exporter"}), None, openmetrics))
        ours = [line for line in page.decode().splitlines() if not line.startswith("# UNIT")]
        ours = ours[next(i for i, line in enumerate(ours) if line.startswith("# HELP process_")) :]
        ours = [line for line in ours if "vramledger_" not in line or "vramledger_sampler_" in line]
        for our, their in zip(ours, theirs, strict=True):
            (name, value), (same, other) = our.rsplit(" ", 1), their.rsplit(" ", 1)
            assert name == same
            if not name.startswith("#") and not name.startswith("python"):
                assert float(value) == pytest.approx(float(other), rel=0.2)


def test_a_sampler_that_has_ended_has_no_figures() -> None:
    """A pid that is gone costs its figures alone; another process that samples has its own."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    page = Exposition(0, lambda: ended.pid).render(Snapshot(), ScrapeRequest(ALL)).decode()
    assert "vramledger_sampler_process" not in page
    assert 'vramledger_collector_success{collector="exporter"} 1.0' in page
    pids = iter((os.getpid(), 1, None))
    later, name = Exposition(0, lambda: next(pids)), "vramledger_sampler_process_start_time_seconds "
    starts = []
    for _ in range(3):
        lines = later.render(Snapshot(), ScrapeRequest(frozenset({"exporter"}))).decode().splitlines()
        starts += [float(line.removeprefix(name)) for line in lines if line.startswith(name)]
    assert len(starts) == len(set(starts)) == 2


def test_what_the_exporter_cannot_collect_of_itself_shows_at_once() -> None:
    """The success of the exporter's own collector is that of this scrape, also for a kept snapshot."""
    works = [True, True, False, False, True]
    turns = iter(works)

    def own() -> Collected:
        if not next(turns):
            raise RuntimeError("torn")
        return []

    shot, page = crowd(1, 2), Exposition(0, lambda: None, lambda: 0.0, collect_own=own)
    texts = [page.render(shot, ScrapeRequest(ALL)).decode() for _ in works]
    assert ['vramledger_collector_success{collector="exporter"} 1.0' in text for text in texts] == works
    assert ["process_cpu_seconds_total" in text for text in texts] == works


def test_a_raising_collector_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    """Its success is 0, its families are missing, all others are served, and the log has one line."""
    broken = True

    def torn(shot: Snapshot) -> Collected:
        if broken:
            raise RuntimeError("torn")
        return hardware.collect(shot, "hardware")

    page = Exposition(0, lambda: None, lambda: 0.0, {**collectors(0), "hardware": torn})
    shot, want = crowd(1, 2), ScrapeRequest(OURS)
    with caplog.at_level(logging.ERROR, "vramledger"):
        first, _ = page.render(shot, want).decode(), page.render(shot, want)
        assert [vars(record)["fields"] for record in caplog.records] == [
            {"collector": "hardware", "err": "RuntimeError: torn"}
        ]
        broken = False
        healed = page.render(shot, want).decode()
        broken = True
        page.render(replace(shot), want)
        assert len(caplog.records) == 2
    assert healed == render(shot, want)
    assert 'vramledger_collector_success{collector="hardware"} 0.0' in first
    gone = set(healed.splitlines()) - set(first.splitlines())
    families = {name for name, family in FAMILIES.items() if family.collector == "hardware"}
    assert {line.split()[2] for line in gone if line.startswith("#")} == families
    others = {line.split("{")[0] for line in gone if not line.startswith("#")} - families
    assert others == {"vramledger_collector_success"}


def test_what_the_sampler_says_of_a_collector_counts() -> None:
    """A collector that failed in the sampler is a failure; without a driver none fails."""
    shot = replace(crowd(1, 2), collectors={"energy": (False, 0.25)})
    lines = render(shot, ScrapeRequest(OURS)).splitlines()
    assert 'vramledger_collector_success{collector="energy"} 0.0' in lines
    assert 'vramledger_collector_duration_seconds{collector="energy"} 0.25' in lines
    assert 'vramledger_collector_success{collector="ledger"} 1.0' in lines
    lines = render(failed(), ScrapeRequest(ALL)).splitlines()
    assert [line for line in lines if line.startswith("vramledger_collector_success")] == [
        'vramledger_collector_success{collector="exporter"} 1.0'
    ]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, name) for name in ("vramledger_device_memory_bytes", "vramledger_sample_failures_total")),
        *((name, name) for name in ("vramledger_process_info", "process_cpu_seconds_total", "python_info")),
        ("vramledger_sample_failures", "vramledger_sample_failures_total"),
        ("vramledger_process", "vramledger_process_info"),
        ("process_cpu_seconds", "process_cpu_seconds_total"),
    ],
)
def test_a_name_selects_its_family_alone(name: str, family: str) -> None:
    """name[] accepts the name of a family or of its samples, in either format."""
    page = render(crowd(1, 2), ScrapeRequest(ALL, frozenset({name})))
    assert {line.split()[2] for line in page.splitlines() if line.startswith("#")} == {family}
    assert {line.split("{")[0].split()[0] for line in page.splitlines() if line[0] != "#"} == {family}


def test_an_unknown_name_gives_an_empty_page() -> None:
    """A name that does not exist is not an error: the page is empty."""
    want = ScrapeRequest(ALL, frozenset({"nothing"}))
    assert render(crowd(1, 2), want) == ""
    assert render(crowd(1, 2), want._replace(openmetrics=True)) == "# EOF\n"


@pytest.mark.parametrize("collector", sorted(ALL))
def test_a_collector_gives_its_own_families(collector: str) -> None:
    """Selecting one collector gives its families and those about the sampling."""
    page = render(rich_host(), ScrapeRequest(frozenset({collector})))
    names = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    found = {FAMILIES[name].collector if name in FAMILIES else "exporter" for name in names}
    # What threads and ties say is in the states.
    assert found == {collector, SAMPLING} - {"threads", "ties"}


@pytest.mark.parametrize(
    ("collect", "exclude", "says"),
    [
        (["ledger"], ["xid"], "give one of them"),
        (["nonsense"], [], "'nonsense'; these are on: agent, energy, exporter"),
        ([], ["no\nsense"], r"'no\nsense'"),
        (["pcie"], [], "'pcie'"),  # it is off
        (["sampling"], [], "'sampling'"),  # this is not a collector
    ],
)
def test_a_selection_without_sense_is_refused(collect: list[str], exclude: list[str], says: str) -> None:
    """Both filters together, or a collector that is unknown or off, give an error of one line."""
    with pytest.raises(UsageError) as error:
        select_collectors(Config(), collect, exclude)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("application/json", TEXT),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", TEXT),  # a browser
        ("text/plain;version=1.0.0", TEXT),
        ("image/png", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("Application/OpenMetrics-Text", OPENMETRICS),
        ("application/openmetrics-text;version=2.0.0", OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1", TEXT),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.7", TEXT),
        ("text/plain;q=0.2, application/openmetrics-text;q=0.7", OPENMETRICS),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=much", TEXT),
        (PROMETHEUS_2, OPENMETRICS),
        (PROMETHEUS_3, f"{OPENMETRICS}; escaping=underscores"),
        (";;=,,;q=", TEXT),
    ],
)
def test_negotiation(accept: str, content_type: str) -> None:
    """The best weight wins, newer versions become 1.0.0, and text 0.0.4 is the fallback."""
    assert negotiate_format(accept).content_type == content_type


@pytest.mark.parametrize("accepted", ["gzip", "deflate, GZIP;q=0.5, br", "x-gzip", "*"])
def test_gzip_is_used_where_it_is_offered(accepted: str) -> None:
    """A page is compressed only for a client that accepts it."""
    assert gzip_accepted(accepted)
    assert not any(gzip_accepted(other) for other in ("", "identity", "gzip;q=0", "gzip;q=0, *", "br"))


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The installer's record beside a package in another place; nothing is cached before or after."""
    monkeypatch.setattr(vramledger, "__file__", str(tmp_path / "vramledger" / "__init__.py"))
    beside = tmp_path / f"vramledger-{vramledger.__version__}.dist-info"
    beside.mkdir()
    revision.cache_clear()
    yield beside / "direct_url.json"
    revision.cache_clear()


def test_the_commit_is_the_installers(record: Path) -> None:
    """Installed from a repository, the exporter reports the commit."""
    vcs = {"vcs": "git", "commit_id": "9b175d3aa0", "requested_revision": "main"}
    record.write_text(json.dumps({"url": "https://example.org/vramledger.git", "vcs_info": vcs}))
    assert revision() == "9b175d3aa0"


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"vcs_info": []}', '{"dir_info": {"editable": true}}']
)
def test_without_a_record_there_is_no_commit(record: Path, text: str | None) -> None:
    """From a folder, an index or an invalid file there is no commit, and no error."""
    if text is not None:
        record.write_text(text)
    assert revision() == ""
