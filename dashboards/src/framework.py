"""What frameworks take against what their programs need: PyTorch, TensorFlow, JAX."""

from __future__ import annotations

from dashboards.src.dashboard import FRAMEWORK as UID
from dashboards.src.dashboard import Dashboard, Row, owner, to_device, to_node, to_owner, to_process
from dashboards.src.panels import (
    BYTES,
    COUNT,
    SHARE,
    Column,
    Panel,
    Query,
    stat,
    table,
    trend,
)
from dashboards.src.queries import DEVICE, HOLDING, NODE, increase, its, number, of, owned, rate
from dashboards.src.shared_panels import exporters

OWNED = 'owner=~"$owner"'
NO_AGENT = "not available: no agent in any program"
NO_TORCH = "not available: no torch program with an agent"
NO_TENSORFLOW = "not available: no TensorFlow program with an agent"
NO_JAX = "not available: no JAX program with an agent"
GREEDY = 'policy=~"preallocate|fraction"'
PROCESS = "{{instance}} GPU {{gpu}}: {{pid}}"


def theirs(metric: str) -> str:
    """Return a metric of the chosen owners' processes."""
    return f"({its(metric, OWNED)})"


def total(metric: str) -> str:
    """Return the sum of a metric over the chosen owners' processes."""
    return f"sum{theirs(metric)}"


def risen(metric: str) -> str:
    """Return by how much a counter of the chosen owners' processes has risen, from point to point."""
    return f"{increase(metric)}\nand on ({HOLDING}) {owned(OWNED)}"


def reporting() -> Panel:
    """Make the indicator of agents: without one, a framework's figures are not available."""
    return stat(
        "Agents",
        "Programs whose agent reports, and those whose agent is silent. A program without an agent has no "
        "figures here.",
        Query(number("vramledger_agent_up", 1), "report"),
        Query(number("vramledger_agent_up", 0), "silent"),
        unit=COUNT, absent="no program has an agent",
    )  # fmt: skip


def cached() -> Panel:
    return stat(
        "In torch's caches",
        "What torch has taken from the driver and no live tensor uses.",
        Query(f"{total('vramledger_torch_reserved_bytes')} - {total('vramledger_torch_allocated_bytes')}"),
        unit=BYTES, absent=NO_TORCH,
    )  # fmt: skip


def reclaimable() -> Panel:
    return stat(
        "Could be given back",
        "What torch.cuda.empty_cache() would give back now, over all programs.",
        Query(total("vramledger_torch_reclaimable_bytes")), unit=BYTES, absent=NO_TORCH,
    )  # fmt: skip


def beyond() -> Panel:
    return stat(
        "Held beyond need",
        "What programs hold beyond the most that they have ever needed.",
        Query(
            f"sum({theirs('vramledger_process_memory_bytes')}\n- on ({HOLDING}) "
            f"{of('vramledger_process:peak_need_bytes:sum')})"
        ),
        unit=BYTES, absent=NO_AGENT,
    )  # fmt: skip


def preallocating() -> Panel:
    return stat(
        "Take all at once",
        "Memory of programs whose framework preallocates the device or a fraction of it.",
        Query(f"sum({owned(OWNED, GREEDY)})"), unit=BYTES,
        absent="none, or no data",
    )  # fmt: skip


def fitting() -> Panel:
    return stat(
        "More jobs would fit",
        "How many more jobs like those that run would fit if each program held what it needs.",
        Query(f"sum(clamp_min({theirs('vramledger_process:more_jobs_fit:floor')}, 0))"),
        unit=COUNT, absent=NO_AGENT,
    )  # fmt: skip


def torch_course() -> Panel:
    names = ("reserved", "allocated", "active", "requested")
    return trend(
        "torch: reserved, allocated, active, requested",
        "Of all programs: taken from the driver, used by live tensors, with what streams may still use, and "
        "what the programs asked for before rounding.",
        *(Query(total(f"vramledger_torch_{name}_bytes"), name) for name in names),
        unit=BYTES, absent=NO_TORCH,
    )  # fmt: skip


def torch_peaks() -> Panel:
    return trend(
        "torch: reserved and its need, by program",
        "What each program's allocator has, and the most that its tensors have used. Far apart for long: "
        "the cache is larger than the program needs.",
        Query(theirs("vramledger_torch_reserved_bytes"), f"{PROCESS} reserved"),
        Query(theirs("vramledger_torch_allocated_peak_bytes"), f"{PROCESS} highest allocated"),
        unit=BYTES, absent=NO_TORCH,
    )  # fmt: skip


def fragmentation() -> Panel:
    largest = theirs("vramledger_torch_largest_free_block_bytes")
    free = (
        f"({theirs('vramledger_torch_reserved_bytes')}\n- on ({DEVICE}, pid) "
        f"{of('vramledger_torch_allocated_bytes')} > 0)"
    )
    return trend(
        "torch: fragmentation",
        "Share of the cache that cannot be handed out as one block. It matters when retries rise as well.",
        Query(f"1 - {largest}\n/ on ({DEVICE}, pid) {free}", PROCESS),
        unit=SHARE, maximum=1, absent=NO_TORCH,
    )  # fmt: skip


def splits() -> Panel:
    return trend(
        "torch: free parts of used blocks",
        "They cannot go back to the driver; 0 with expandable segments.",
        Query(theirs("vramledger_torch_inactive_split_bytes"), PROCESS),
        unit=BYTES, absent=NO_TORCH,
    )  # fmt: skip


def retries() -> Panel:
    return trend(
        "torch: retries and failures",
        "Allocations that were served only after the cache was flushed, and those that failed for lack of "
        "memory.",
        Query(risen("vramledger_torch_alloc_retries_total"), f"{PROCESS} retries"),
        Query(risen("vramledger_torch_ooms_total"), f"{PROCESS} out of memory"),
        unit=COUNT, absent=NO_TORCH,
    )  # fmt: skip


def unneeded() -> Panel:
    return trend(
        "torch: cache that nobody needed for an hour",
        "Reserved beyond the hour's highest allocated, where that is many times more.",
        Query(theirs("vramledger_process:torch_cache_unneeded_bytes:max1h"), PROCESS),
        unit=BYTES, absent="no cache is that large, or no torch program with an agent",
    )  # fmt: skip


def policy_counts() -> Panel:
    chosen = f"max by ({NODE}, pid) ({owned(OWNED)})"
    policy = of("vramledger_framework_policy_info")
    return table(
        "Frameworks and how they take memory",
        "How many programs take memory by which policy, and how that is known.",
        Query(f"count by (framework, policy, source) ({policy}\nand on ({NODE}, pid) {chosen})"),
        columns=[
            Column("framework", "Framework"),
            Column("policy", "Policy"),
            Column("source", "Known by"),
            Column("Value", "Programs", COUNT, bar=True),
        ],
        sort="Value", absent="nobody holds memory, or no data", height=8,
    )  # fmt: skip


def hoarders() -> Panel:
    by = f"{DEVICE}, pid"
    labels = f"{by}, command, framework, policy, owner"
    return table(
        "Hoarding factor",
        "How many times its own peak need each program holds, how many more jobs of that need would fit on "
        "its device, and how many of its kind the processors would carry.",
        Query(f"max by ({labels}) ({owned(OWNED)})"),
        Query(f"max by ({by}) ({theirs('vramledger_process:peak_need_bytes:sum')})"),
        Query(f"max by ({by}) ({theirs('vramledger_process:hoarding_factor:ratio')})"),
        Query(f"max by ({by}) ({theirs('vramledger_process:more_jobs_fit:floor')})"),
        Query(f"max by ({by}) ({theirs('vramledger_process:jobs_fit_sms:floor')})"),
        columns=[
            Column("owner", "Owner", link=to_owner()),
            Column("pid", "Pid", link=to_process(), width=90),
            Column("command", "Program"),
            Column("framework", "Framework", width=110),
            Column("policy", "Policy", width=110),
            Column("Value #A", "Holds", BYTES, width=110),
            Column("Value #B", "Most needed", BYTES, width=120),
            Column("Value #C", "Holds, times need", COUNT, bar=True),
            Column("Value #D", "More would fit", COUNT, width=130),
            Column("Value #E", "The SMs carry", COUNT, width=120),
            Column("instance", "Node", link=to_node()),
            Column("gpu", "GPU", link=to_device(), width=70),
        ],
        sort="Value #C", absent=NO_AGENT, width=24,
    )  # fmt: skip


def tensorflow() -> Panel:
    return trend(
        "TensorFlow: limit against need",
        "The most that its allocator may take, the most that the program has used, and what it uses now.",
        Query(theirs("vramledger_tensorflow_limit_bytes"), f"{PROCESS} limit"),
        Query(theirs("vramledger_tensorflow_in_use_peak_bytes"), f"{PROCESS} most used"),
        Query(theirs("vramledger_tensorflow_in_use_bytes"), f"{PROCESS} in use"),
        unit=BYTES, absent=NO_TENSORFLOW,
    )  # fmt: skip


def jax() -> Panel:
    return trend(
        "JAX: pool against need",
        "What its allocator has taken, the most that the program has used, and what it uses now.",
        Query(theirs("vramledger_jax_pool_bytes"), f"{PROCESS} pool"),
        Query(theirs("vramledger_jax_in_use_peak_bytes"), f"{PROCESS} most used"),
        Query(theirs("vramledger_jax_in_use_bytes"), f"{PROCESS} in use"),
        unit=BYTES, absent=NO_JAX,
    )  # fmt: skip


def others() -> list[Panel]:
    return [
        trend(
            "CuPy and RMM: pools",
            "What their pools have taken, and what of it is in use.",
            Query(theirs("vramledger_cupy_pool_bytes"), f"{PROCESS} CuPy pool"),
            Query(theirs("vramledger_cupy_in_use_bytes"), f"{PROCESS} CuPy in use"),
            Query(theirs("vramledger_rmm_pool_bytes"), f"{PROCESS} RMM pool"),
            Query(theirs("vramledger_rmm_in_use_bytes"), f"{PROCESS} RMM in use"),
            unit=BYTES, absent="not available: no CuPy or RMM program with an agent",
        ),
        trend(
            "Private pools of torch",
            "Memory in pools of their own, such as those of CUDA graphs.",
            Query(theirs("vramledger_torch_private_pools_bytes"), PROCESS),
            unit=BYTES, absent=NO_TORCH,
        ),
        trend(
            "Freed by Python's garbage collector",
            "Memory that came back only while the cyclic collector ran: tensors in cycles wait for it.",
            Query(increase("vramledger_python_collector_freed_bytes_total"), "{{instance}}: {{pid}}"),
            unit=BYTES, absent=NO_AGENT,
        ),
        trend(
            "Runs of Python's garbage collector",
            "Runs a second; none for long, with tensors in cycles, looks like a leak.",
            Query(rate("vramledger_python_collections_total"), "{{instance}}: {{pid}}"),
            unit="cps", absent=NO_AGENT,
        ),
    ]  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of frameworks."""
    return Dashboard(
        UID,
        "Frameworks",
        "What PyTorch, TensorFlow and JAX take against what their programs need, and how many more jobs "
        "would fit.",
        [
            Row("Now", [exporters(), reporting(), cached(), reclaimable(), beyond(), fitting()]),
            Row("Who holds more than it needs", [hoarders(), policy_counts(), torch_peaks()]),
            Row("torch", [torch_course(), fragmentation(), splits(), retries(), unneeded()]),
            Row("TensorFlow and JAX", [tensorflow(), jax(), preallocating()]),
            Row("Others", others(), folded=True),
        ],
        [owner()],
    )
