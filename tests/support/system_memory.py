"""Files in which the kernel tells of its memory, as it writes them."""

from pathlib import Path


def write_host_memory(procfs: Path, *, total: int, available: int) -> None:
    """Write ``meminfo`` of a host, sizes in KiB."""
    half = available // 2
    lines = {"MemTotal": total, "MemFree": half, "MemAvailable": available, "Cached": half}
    procfs.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{name + ':':<15} {size:8} kB\n" for name, size in lines.items())
    (procfs / "meminfo").write_text(f"{text}HugePages_Total:       0\n", encoding="ascii")


def write_node(  # noqa: PLR0913 - a figure each
    rootfs: Path, number: int, *, total: int, free: int, file: int = 0, anonymous: int = 0, kernel: int = 0,
    processors: str = "",
) -> None:  # fmt: skip
    """Write the files of a NUMA node below a root, sizes in KiB."""
    directory = rootfs / f"sys/devices/system/node/node{number}"
    directory.mkdir(parents=True, exist_ok=True)
    sizes = {
        "MemTotal": total, "MemFree": free, "MemUsed": total - free, "FilePages": file,
        "AnonPages": anonymous, "KernelStack": 1 if kernel else 0, "PageTables": 2 if kernel > 2 else 0,
        "Slab": max(0, kernel - 3),
    }  # fmt: skip
    lines = [f"Node {number} {name + ':':<15} {size:8} kB\n" for name, size in sizes.items()]
    lines.append(f"Node {number} HugePages_Total:     0\n")
    (directory / "meminfo").write_text("".join(lines), encoding="ascii")
    (directory / "cpulist").write_text(f"{processors}\n", encoding="ascii")
