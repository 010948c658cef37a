"""Write the whole evidence for one holder's state, in lines for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import structs

from vramledger.accounting.agent_figures import needed, overhead
from vramledger.accounting.owners.owner_usage import UNKNOWN, owner_of
from vramledger.model.reading import ParentFacts, ProcessFacts, ProcessRow
from vramledger.model.records import JSON_VERSION, Json, label_text
from vramledger.model.snapshot import AgentSnapshot, DeviceSnapshot, Holding, ProcessSnapshot, Snapshot
from vramledger.verdicts.remedies import allocator_advice, remedy
from vramledger.views.ledger_json import public_holding
from vramledger_agent.printable import gib, printable, span
from vramledger_agent.protocol.frameworks import COUNTER_FIGURES

_LETTERS = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting in the kernel, cannot be interrupted",
    "Z": "zombie: exited",
    "X": "dead",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "I": "idle kernel thread",
}


def evidence_lines(snapshot: Snapshot, pid: int) -> list[str]:
    """Return everything that is known about a holder; empty when the pid holds nothing."""
    held = _held_by(snapshot, pid)
    return [printable(line) for line in _lines(snapshot, pid, held)] if held else []


def evidence_json(snapshot: Snapshot, pid: int) -> dict[str, Json] | None:
    """Return all that is known of a holder as JSON values, ``start`` in ticks; None without one."""
    held = _held_by(snapshot, pid)
    if not held:
        return None
    process = snapshot.processes.get(pid)
    facts = snapshot.facts_of(pid)
    first = process.first if process is not None else None
    row = snapshot.rows.get(pid) if process is not None else None
    return {
        "version": JSON_VERSION,
        "time": snapshot.time,
        "source": snapshot.source,
        "recording": snapshot.recording,
        "pid": pid,
        "holdings": [
            {
                "gpu": device.reading.index,
                "uuid": device.reading.uuid,
                **msgspec.to_builtins(public_holding(each, device, snapshot)),
                "lists": each.kinds,
                "quiet_since": each.quiet_since,
                "evidence": each.evidence,
                "utilization_by_process_answered": device.reading.process_utilization is not None,
                "device_utilization": (device.reading.utilization or {}).get("gpu"),
                "device_activity": None if device.reading.activity is None else dict(device.reading.activity),
                "schedulers": None
                if device.reservation_status is None
                else list(device.reservation_status.schedulers),
            }
            for device, each in held
        ],
        "row": None if row is None else dict(row._asdict()),
        # Without the first facts, those that are there are only what the page shows.
        "facts": None if facts is None or first is None else _facts_json(facts),
        "first_parent": None if first is None else _parent_json(first.parent),
        "rank": None if process is None or process.rank is None else dict(process.rank._asdict()),
    }


def _held_by(snapshot: Snapshot, pid: int) -> list[tuple[DeviceSnapshot, Holding]]:
    return [(device, each) for device in snapshot.devices for each in device.holdings if each.pid == pid]


def _facts_json(facts: ProcessFacts) -> dict[str, Json]:
    return {
        **structs.asdict(facts),
        "owner": None if facts.owner is None else dict(facts.owner._asdict()),
        "settings": dict(facts.settings),
        "parent": _parent_json(facts.parent),
    }


def _parent_json(parent: ParentFacts | None) -> Json:
    return None if parent is None else dict(parent._asdict())


def _lines(snapshot: Snapshot, pid: int, held: list[tuple[DeviceSnapshot, Holding]]) -> Iterator[str]:
    process = snapshot.processes.get(pid)
    now = snapshot.time or 0.0
    facts = snapshot.facts_of(pid)
    yield f"pid {pid}  {(facts.command if facts is not None else '') or 'unknown program'}"
    agent = snapshot.agents.get(pid)
    for device, holding in held:
        yield from _holding(device, holding, now)
        if advice := remedy(holding, process, device):
            yield f"    what to do   {advice}"
        if agent is not None:
            yield from _pools(agent, device.reading.uuid, holding)
    yield from _kv_cache(snapshot, pid)
    yield from _agent(agent, now)
    if facts is None or (process is not None and process.first is not None):
        yield from _row(snapshot.rows.get(pid) if process is not None else None)
    if process is not None:
        yield f"  started        {span(now - process.start_time)} ago"
    if facts is not None and (process is None or process.first is None):
        kind, name = owner_of(facts) or UNKNOWN
        yield f"  user           {facts.user or 'not known'} (uid {'?' if facts.uid is None else facts.uid})"
        yield f"  owner          {kind} {name}".rstrip()
        yield from _pod_labels(snapshot, facts)
        yield "  facts          not shown: only root and its own user see more of it than the page shows"
        return
    if process is None or facts is None:
        yield "  facts          none: it has ended, /proc hides it, or they come with the next sample"
        return
    yield from _facts(facts, process.first or facts, _rank(process))
    yield from _pod_labels(snapshot, facts)


def _pod_labels(snapshot: Snapshot, facts: ProcessFacts) -> Iterator[str]:
    """Say which of the allowed labels the holder's pod has; nothing where they are not known."""
    labels = snapshot.pod_labels_of(facts.owner)
    if labels is not None:
        shown = ", ".join(f"{name}={label_text(value)}" for name, value in labels.items())
        yield f"  pod's labels   {shown or 'none of those that --pods.labels names'}"


def _holding(device: DeviceSnapshot, holding: Holding, now: float) -> Iterator[str]:
    gpu, uuid = device.key
    kinds = {"C": "compute", "G": "graphics", "M": "MPS"}
    lists = ", ".join(kinds.get(kind, kind) for kind in holding.kinds) or "no list"
    yield f"  GPU {gpu} {uuid}"
    yield f"    state        {holding.state.value} ({holding.grade.value}), for {span(now - holding.since)}"
    yield f"    because      {holding.why}"
    yield f"    memory       {gib(holding.memory)}, peak {gib(holding.peak)}; NVML's lists: {lists}"
    if holding.uncharged is not None:
        yield f"    uncharged    {holding.uncharged.why} ({holding.uncharged.grade.value})"
    sm = "no sample for it" if holding.sm is None else f"SM {holding.sm:.0%}"
    busy = (device.reading.utilization or {}).get("gpu")
    whole = "unknown" if busy is None else f"{busy:.0%}"
    answered = "not answered" if device.reading.process_utilization is None else "answered"
    yield f"    utilisation  {sm}; query by process {answered}; whole device {whole}"
    yield from _counters(device)
    yield from _reservation(device, holding)
    worked = "never seen" if holding.last_active is None else f"{span(now - holding.last_active)} ago"
    quiet = "not known" if holding.quiet_since is None else span(now - holding.quiet_since)
    newest = "says something" if holding.evidence else "says nothing"
    yield f"    work         last sign {worked}; quiet by evidence for {quiet}; the newest sample {newest}"


def _kv_cache(snapshot: Snapshot, pid: int) -> Iterator[str]:
    """Say how large and how full the holder's KV cache is; nothing where its server does not say it."""
    known = snapshot.kv_caches.get(pid)
    if known is not None:
        size = "size not known" if known.memory is None else f"{gib(known.memory)} of what it holds"
        tokens = "" if known.tokens is None else f", {known.tokens:,} tokens"
        used = "use not known" if known.usage is None else f"{known.usage:.1%} in use by requests"
        yield f"  KV cache       {size}{tokens}, {used}; its vLLM server says so"


def _counters(device: DeviceSnapshot) -> Iterator[str]:
    """Say what the GPU's own counters show of the time since the sample before."""
    activity = device.reading.activity
    if activity is None or "sm" not in activity:
        yield "    counters     none (GPM needs Hopper or newer), so idleness is not proven"
        return
    kernels = "no kernel ran" if activity["sm"] == 0 else f"SM {activity['sm']:.2%}"
    links = (name for name in activity if name.startswith(("pcie", "nvlink")))
    traffic = sum(activity[name] for name in links) / 2**20
    memory = f"memory {activity['dram']:.1%}, " if "dram" in activity else ""
    yield f"    counters     {kernels}, {memory}{traffic:.1f} MiB/s over PCIe and NVLink"


def _reservation(device: DeviceSnapshot, holding: Holding) -> Iterator[str]:
    """Say what schedulers have reserved for this holder; nothing where none does."""
    if device.reservation_status is None:
        return
    schedulers = " and ".join(device.reservation_status.schedulers)
    whom = (
        ", ".join(f"{each.type} {each.name}" for each in device.reservation_status.reservations) or "no owner"
    )
    if device.reservation_status.unreserved_pids is None:
        its = "whether its owner is among them is not known"
    elif holding.pid in device.reservation_status.unreserved_pids:
        its = "its owner is NOT among them"
    else:
        its = "its owner is among them, or too little is known of its owner to exclude it"
    yield f"    reservation  by {schedulers} for {whom}; {its}"


def _pools(agent: AgentSnapshot, uuid: str, holding: Holding) -> Iterator[str]:
    for pool in agent.pools.get(uuid, ()):
        shown = ", ".join(
            f"{name.replace('_', ' ')} {value if name in COUNTER_FIGURES else gib(value)}"
            for name, value in {**pool.figures, **pool.categories}.items()
        )
        yield f"    {pool.framework:<12} {shown}"
        advice = allocator_advice(
            pool.figures.get("reserved"), pool.figures.get("inactive_split"), agent.settings(pool.framework)
        )
        if advice is not None:
            yield f"    advice       {advice}"
    rest, need = overhead(agent, uuid, holding), needed(agent, uuid, holding)
    if rest is not None:
        yield f"    beyond them  {gib(rest)}: context, libraries, other code"
    if need is not None and holding.held is not None:
        more = holding.held - need
        over = (
            "holds that now" if not more else f"holds {gib(abs(more))} {'more' if more > 0 else 'less'} now"
        )
        yield f"    needed       {gib(need)} at its peak; {over}"


def _agent(agent: AgentSnapshot | None, now: float) -> Iterator[str]:
    if agent is None:
        yield "  agent          none is known"
        return
    contact = "never heard" if agent.received is None else f"last report {span(now - agent.received)} ago"
    yield f"  agent          {agent.problem or 'up'}, {contact}" + (f"; {agent.why}" if agent.why else "")
    report = agent.report
    if report is None:
        return
    if agent.unmapped:
        yield f"    not shown    {agent.unmapped} device(s) of its report could not be assigned to a GPU"
    for each in report.frameworks:
        statistics = "" if each.supported else "; its allocator gives no statistics"
        about = (
            f"policy {each.policy or 'not reported'}, allocator "
            f"{each.allocator or 'not reported'}{statistics}"
        )
        yield f"    {each.framework:<12} {each.version or 'version not reported'}, {about}"
        if each.settings:
            shown = ", ".join(f"{name} {value}" for name, value in each.settings.items())
            yield f"    settings     {shown}"
        if each.pinned is not None:
            yield f"    pinned       {gib(each.pinned)} of host memory, {gib(each.pinned_in_use)} in use"
    if report.collector is not None and report.collector.enabled is False:
        yield "    collector    off: tensors in reference cycles are never freed"
    if report.last_oom is not None:
        oom = report.last_oom
        where = f"; see {oom.report}" if oom.report else ""
        request = f"{gib(oom.requested)} for {oom.framework}"
        yield f"    out of memory {span(now - oom.time)} ago: {request}, {oom.verdict}{where}"


def _row(row: ProcessRow | None) -> Iterator[str]:
    if row is None:
        yield "  in /proc       nothing"
        return
    letter = _LETTERS.get(row.state, "unknown")
    yield f"  leader         state {row.state} ({letter}), {row.threads} thread(s)"
    yield f"  group          {row.pgrp}{_leader_note(row.pgrp, row.pid)}"
    yield f"  session        {row.session}{_leader_note(row.session, row.pid)}"
    yield f"  terminal       {'none' if row.tty == 0 else f'device {row.tty}'}"
    yield f"  parent now     pid {row.ppid}"


def _leader_note(leader: int, pid: int) -> str:
    return " (it leads it)" if leader == pid else ""


def _parent(parent: ParentFacts | None) -> str:
    if parent is None:
        return "none visible"
    init = ", init of its PID namespace" if parent.init else ""
    name = parent.command if parent.comm in ("", parent.command) else f"{parent.command} [{parent.comm}]"
    return f"pid {parent.pid} {name}, start {parent.start}{init}"


def _rank(process: ProcessSnapshot) -> str | None:
    rank = process.rank
    if rank is None:
        return None
    by = "environment" if process.facts is not None and process.facts.rank == rank else "agent"
    return f"{rank.number} of {rank.size} of job {rank.job}, by its {by}"


def _facts(facts: ProcessFacts, first: ProcessFacts, rank: str | None) -> Iterator[str]:
    kind, name = owner_of(facts) or UNKNOWN
    yield f"  parent         {_parent(facts.parent)}"
    yield f"  first parent   {_parent(first.parent)}"
    leader = {None: "not known", True: "alive", False: "gone"}[facts.leader_alive]
    yield f"  group's leader {leader}"
    yield f"  worker evidence              {', '.join(facts.signs) or 'none'}"
    yield f"  signals that it ignores      {', '.join(facts.ignores) or 'none of HUP, INT, QUIT'}"
    unsaid = "perhaps: systemd does not say it" if facts.may_be_service_main else "no"
    yield f"  main process of a service    {'yes' if facts.service_main else unsaid}"
    yield f"  pid in nested namespaces     {' '.join(map(str, facts.nspid)) or 'not known'}"
    yield f"  user           {facts.user or 'not known'} (uid {'?' if facts.uid is None else facts.uid})"
    yield f"  owner          {kind} {name}".rstrip()
    if rank is not None:
        yield f"  rank           {rank}"
    for line in facts.cgroup or ():
        yield f"  cgroup         {line}"
    if facts.denied:
        yield f"  not readable   {', '.join(facts.denied)}"
