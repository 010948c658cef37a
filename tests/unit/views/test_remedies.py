"""Every state that needs an action has a remedy, and no other has."""

from dataclasses import replace

import pytest
from msgspec import structs

from tests.support.builders import MIB, device, holding, process
from tests.support.sure import sure
from vramledger.model.reading import HiddenHolder, Owner
from vramledger.model.snapshot import Grade, LeftBytes, Policy, State, UnchargedBytes
from vramledger.verdicts.remedies import about_hidden, about_unattributed, allocator_advice, remedy

GIB = 1024 * MIB


@pytest.mark.parametrize("state", State)
def test_every_state_but_active_has_a_remedy(state: State) -> None:
    """Each state says what to do, with its own pid and GPU; an active holder has none."""
    todo = remedy(holding(4711, state=state), process(4711), device(3))
    if state is State.ACTIVE:
        assert todo is None
        return
    assert todo is not None
    assert "{" not in todo
    assert "4711" in todo or state in (State.DEAD, State.STUCK, State.UNKNOWN)


@pytest.mark.parametrize("working", [True, False])
@pytest.mark.parametrize("state", State)
def test_no_hint_ends_anything(state: State, *, working: bool) -> None:
    """Who copies a hint gets a dry run: none contains ``--yes``, and the command has the pid."""
    hint = remedy(replace(holding(4711, state=state), working=working), process(4711), device(3)) or ""
    assert "--yes" not in hint
    assert "vramledger end" not in hint or "`vramledger end --pid 4711`" in hint


@pytest.mark.parametrize(
    ("framework", "policy", "says"),
    [
        ("tensorflow", "preallocate", "TF_FORCE_GPU_ALLOW_GROWTH=true"),
        ("jax", "fraction", "XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        ("torch", "caching", "torch.cuda.empty_cache()"),
        ("onnxruntime", "growth", "only the end of the program"),
    ],
)
def test_an_idle_holder_learns_of_its_policy(framework: str, policy: str, says: str) -> None:
    """Besides asking its user, the sentence says which setting of its framework helps."""
    known = replace(process(7), policy=Policy(framework, policy, "pattern", "seen"))
    todo = sure(remedy(holding(7, state=State.IDLE), known, device(0)))
    assert "Ask its user" in todo
    assert says in todo


def test_a_notebook_is_shut_down_by_its_user() -> None:
    """No sentence says to kill a notebook's kernel from outside."""
    known = process(7)
    assert known.facts is not None
    known = replace(known, facts=structs.replace(known.facts, owner=Owner("user", "ada", notebook="a.ipynb")))
    todo = remedy(holding(7, state=State.IDLE), known, device(0))
    assert todo == "Ask its user to shut the notebook's kernel down."


def test_unattributed_memory_is_explained_as_far_as_is_known() -> None:
    """Possible hidden holders, none, and not known are three explanations."""
    stray = HiddenHolder(77, 1, "cuda", "x", None, (0,))
    watcher = HiddenHolder(78, 1, "monitor", "y", None, (0,))
    assert about_unattributed(device(0, unattributed=0)) is None
    assert "pid 77." in str(about_unattributed(device(0, hidden=(stray, watcher))))
    assert "was not freed" in str(about_unattributed(device(0, hidden=(watcher,))))
    assert "not known here" in str(about_unattributed(device(0)))
    assert len({about_hidden(kind) for kind in ("cuda", "monitor", "inherited", "unknown")}) == 4


def test_unattributed_memory_says_what_was_tried() -> None:
    """Beyond what contexts leave, the text says who could have a part of it and who had created it."""
    several = UnchargedBytes(0, GIB, 0, Grade.INFERRED, "")
    left = LeftBytes(694, "alice", 0.0, GIB, GIB, (), "created by pid 694 of alice, which ended at 03:12 UTC")
    able = device(0, [replace(holding(7), uncharged=several)], unattributed=4 * GIB, hidden=())
    assert "No holder is known to map" in str(about_unattributed(device(0, unattributed=4 * GIB, hidden=())))
    assert "pid 7 can have a part" in str(about_unattributed(able))
    assert "created by pid 694 of alice" in str(about_unattributed(replace(able, left=(left,))))
    assert "map" not in str(about_unattributed(device(0, unattributed=9 * MIB, hidden=())))


def test_memory_of_the_dead_may_be_kept_by_a_child() -> None:
    """Where a hidden process has the device open, it is to be ended first, before anybody resets the GPU."""
    child = HiddenHolder(1203, 1, "cuda", "x", None, (0,))
    for state in (State.DEAD, State.ZOMBIE):
        todo = str(remedy(holding(7, state=state), None, device(0, hidden=(child,))))
        assert todo.startswith("Hidden pid 1203 has the device open")
        assert "`vramledger end --pid 1203` first" in todo
    assert "Hidden" not in str(remedy(holding(7, state=State.DEAD), None, device(0, hidden=())))


@pytest.mark.parametrize(
    ("reserved", "between", "settings", "words"),
    [
        (10 * GIB, 4 * GIB, {"expandable_segments": "false"}, "at the next start makes"),
        (10 * GIB, 4 * GIB, {}, "if that is not set already"),
        (
            10 * GIB, 4 * GIB, {"expandable_segments": "false", "max_split_size_mb": "64"},
            "instead of max_split",
        ),
        (10 * GIB, 4 * GIB, {"expandable_segments": "true"}, None),
        (100 * GIB, 4 * GIB, {"expandable_segments": "false"}, None),
        (GIB // 2, GIB // 8, {"expandable_segments": "false"}, None),
        (None, 4 * GIB, {}, None),
        (10 * GIB, None, {}, None),
    ],
)  # fmt: skip
def test_advice_about_the_allocator_knows_its_settings(
    reserved: int | None, between: int | None, settings: dict[str, str], words: str | None
) -> None:
    """A setting is advised where it frees much and is not set; what is not known is said."""
    advice = allocator_advice(reserved, between, settings)
    assert (advice is None) == (words is None)
    assert words is None or words in str(advice)
