"""Decide which framework holds memory and by which policy it takes memory, from outside, without the agent.

There are three kinds of evidence, in this order: the environment that the program was started with, the
memory pattern of its holding, and what the framework does by default. What a program sets in itself
(``set_memory_growth``, ``os.environ``) shows in the memory pattern alone. No part of a variable's value ever
gets into a verdict, only the names of this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vramledger.model.snapshot import UNKNOWN, Policy
from vramledger_agent.protocol.frameworks import FRAMEWORKS, FRAMEWORKS_BY_NAME, Framework

MIB = 2**20
STEP_BYTES = 128 * MIB
"""A smaller rise is a context, a library's code or its workspace (cuBLAS: 68 MiB), and not a step."""

GROWTH_STEPS = 3
"""Steps that count as growth: TensorFlow with a limit takes a context and one or two pools."""

PREALLOCATED_SHARE = 0.9
"""The share of the free memory that only a preallocation takes at once."""

LATE_PREALLOCATED_SHARE = 0.95
"""The share of a device that means preallocation when the jump itself was not seen."""

SHARE_TOLERANCE = 0.03
"""The tolerance of a share of the device: the driver's reserve does not count in the framework's total."""

CONTEXT_BYTES = 1024 * MIB
"""What a process may hold beyond that share: the context, cuBLAS and cuDNN."""

_FRAMEWORK_BY_LIBRARY = {library.name: each for each in FRAMEWORKS for library in each.libraries}
_LIBRARIES_BY_PRECEDENCE = sorted(
    (library for framework in FRAMEWORKS for library in framework.libraries), key=lambda library: library.weak
)
_CUDA = FRAMEWORKS_BY_NAME["cuda"]


class MemoryPattern(NamedTuple):
    """The memory pattern of a holding, in bytes."""

    memory: int  # held now
    total: int  # of the device
    watched: bool = False  # we saw it appear, so its first bytes were taken within one sampling interval
    jump: int = 0  # the largest rise between two samples; the first bytes count if ``watched``
    left: int | None = None  # what was free on the device after that rise, None when not known
    steps: int = 0  # the number of rises of at least :data:`STEP_BYTES` since the first sample

    def after_change(self, memory: int, free: int | None) -> MemoryPattern:
        rise = memory - self.memory
        steps = self.steps + (rise >= STEP_BYTES)
        if rise > self.jump:
            return self._replace(memory=memory, jump=rise, left=free, steps=steps)
        return self._replace(memory=memory, steps=steps)


Found = tuple[str, str, str]


def classify(
    libraries: Sequence[str] | None,
    settings: Sequence[tuple[str, str]],
    patterns: Sequence[MemoryPattern] = (),
    *,
    environ: bool = True,
) -> Policy:
    """Say which framework a process uses and by which policy it takes memory.

    ``patterns``: of its holdings, one for each device; the one with the largest share of its device counts.
    """
    pattern = max(patterns, key=lambda each: each.memory / max(1, each.total), default=None)
    framework = _framework(libraries, dict(settings), pattern)
    found = None
    if framework is not None:
        found = _by_environment(framework, dict(settings), pattern)
    if found is None and pattern is not None:
        found = _by_pattern(framework, pattern)
    if found is None and framework is not None and framework.default is not None:
        policy, why = framework.default
        found = (policy, "default", why)
    if found is None:
        found = (UNKNOWN, "none", _undecided(framework, libraries, pattern))
    policy, source, why = found
    if not environ and source != "environ":
        why += "; its environment is not readable to us"
    return Policy(UNKNOWN if framework is None else framework.name, policy, source, why)


def _framework(
    libraries: Sequence[str] | None, settings: Mapping[str, str], pattern: MemoryPattern | None
) -> Framework | None:
    """Choose the framework that holds the memory, where several are loaded.

    A library that is only imported holds nothing: TensorBoard loads TensorFlow into a torch program, and a
    data loader loads it into a JAX program. So we assume the first one, with two exceptions. The first one is
    often idle, and the holding has a memory pattern that only one of the others makes. Or another one imports
    the first one by itself (TensorFlow 2.21 imports JAX where it is installed, CUDA plugin included): then
    only the first one's own memory pattern, or the settings of one of the two, can decide.
    """
    loaded = [library for library in _LIBRARIES_BY_PRECEDENCE if library.name in (libraries or ())]
    if not loaded:
        return None
    first = _FRAMEWORK_BY_LIBRARY[loaded[0].name]
    others = [_FRAMEWORK_BY_LIBRARY[library.name] for library in loaded[1:] if not library.weak]
    if pattern is not None and first.often_idle:
        for other in others:
            if _preallocated(other, pattern, seen=True):
                return other
    importers = [other for other in others if first.name in other.imports]
    if not importers or (pattern is not None and _preallocated(first, pattern)):
        return first
    configured = [
        framework
        for framework in (first, *importers)
        if any(each.matches(settings.get(each.variable, "")) for each in framework.settings)
    ]
    return configured[0] if len(configured) == 1 else None


def _by_environment(
    framework: Framework, settings: Mapping[str, str], pattern: MemoryPattern | None
) -> Found | None:
    for setting in framework.settings:
        value = settings.get(setting.variable)
        if not value or not setting.matches(value):
            continue
        why = f"{setting.variable} {setting.why}"
        if setting.policy is not None:
            keys = {item.partition(":")[0] for item in value.replace(" ", "").split(",")}
            shown = ", ".join(key for key in setting.keys if key in keys)
            return setting.policy, "environ", f"{why} ({shown})" if shown else why
        if pattern is not None and _took_all(pattern):
            return "preallocate", "environ", f"{why}, and {_held(pattern)}"
        if pattern is not None and _settled_low(pattern):
            return "limit", "pattern", f"its growth is forbidden, but {_held(pattern)}"
    return None


def _by_pattern(framework: Framework | None, pattern: MemoryPattern) -> Found | None:
    if framework is None or framework is _CUDA:
        all_at_once = pattern.jump >= PREALLOCATED_SHARE * pattern.total
        return ("preallocate", "pattern", _held(pattern)) if all_at_once else None
    found = _by_preallocation(framework, pattern)
    if found is None and framework.stepwise is not None and pattern.steps >= GROWTH_STEPS:
        why = f"{_held(pattern)} after growing in {pattern.steps} steps"
        found = (framework.stepwise, "pattern", why)
    return found


def _by_preallocation(framework: Framework, pattern: MemoryPattern) -> Found | None:
    share, held = framework.preallocates, _held(pattern)
    found: Found | None = None
    if share is None:
        return None
    if share < 1:
        default = f"{framework.title}'s default of {share:.0%}"
        if _preallocated(framework, pattern):
            found = ("fraction", "pattern", f"{held}, which is {default}")
        elif _took_all(pattern):
            found = ("fraction", "pattern", f"{held}, more than {default}")
    elif _took_all(pattern):
        found = ("preallocate", "pattern", f"{held}, having taken nearly all that was free")
    elif not pattern.steps and pattern.memory >= LATE_PREALLOCATED_SHARE * pattern.total:
        why = f"{held}, as by {framework.title}'s default; we did not see the allocation"
        found = ("preallocate", "pattern", why)
    return found


def _preallocated(framework: Framework, pattern: MemoryPattern, *, seen: bool = False) -> bool:
    """Tell whether a holding has the default size; a share fits the first size too, unless ``seen``."""
    share = framework.preallocates
    if share is None or share == 1:
        return share is not None and _took_all(pattern)
    low = (share - SHARE_TOLERANCE) * pattern.total
    high = share * pattern.total + CONTEXT_BYTES
    late = not pattern.watched and not pattern.steps and not seen
    return low <= pattern.jump <= high or (late and low <= pattern.memory <= high)


def _took_all(pattern: MemoryPattern) -> bool:
    """Tell whether nearly all of the free memory was taken between two samples, and little before that."""
    if pattern.jump >= PREALLOCATED_SHARE * pattern.total:
        return True
    if pattern.left is None or pattern.jump < pattern.total / 4:
        return False  # on a full device any program takes the little that is left
    return pattern.jump >= PREALLOCATED_SHARE * max(pattern.jump + pattern.left, pattern.memory)


def _settled_low(pattern: MemoryPattern) -> bool:
    """Tell whether its pool was taken at once and is far from the whole device: a fixed limit."""
    return pattern.watched and pattern.jump >= STEP_BYTES and 2 * pattern.memory < pattern.total


def _held(pattern: MemoryPattern) -> str:
    share = f"{pattern.memory / max(1, pattern.total):.0%} of the device"
    if pattern.jump * 2 > pattern.memory:
        return f"it took {pattern.jump // MIB} MiB between two samples and holds {share}"
    return f"it holds {share}"


def _undecided(
    framework: Framework | None, libraries: Sequence[str] | None, pattern: MemoryPattern | None
) -> str:
    if libraries is None:
        return "what it has loaded is not readable"
    if framework is None:
        loaded = dict.fromkeys(
            _FRAMEWORK_BY_LIBRARY[library.name].title
            for library in _LIBRARIES_BY_PRECEDENCE
            if library.name in libraries and not library.weak and library.name != "libcuda"
        )
        if loaded:
            return f"it has loaded {' and '.join(loaded)}, and which of them holds its memory does not show"
        return "it has loaded no framework that we know"
    if framework is _CUDA:
        return "it calls CUDA directly: it takes what it allocates"
    if framework.preallocates is not None and pattern is not None:
        return f"{_held(pattern)}, which is not the default; growth or a limit, set inside the program"
    return f"{framework.title} leaves its policy to the program"
