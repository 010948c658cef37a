"""An agent's message: what is accepted and what is refused, whatever a hostile program sends."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.agent_client import report, torch
from tests.support.sure import sure
from vramledger.model.agent_report import (
    REASONS,
    AgentReport,
    RefusedError,
    ReportedRank,
    locate_rank,
    parse,
    plain,
    read_report,
)
from vramledger_agent.protocol.frameworks import REPORTING_FRAMEWORKS
from vramledger_agent.protocol.messages import MAX_DEVICES, MAX_MESSAGE_BYTES, MAX_TEXT_CHARS

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
KEYS = sorted(
    {"sequence", "dropped", "agent", "interval", "monotonic", "python", "visible", "consents", "errors"}
    | {"collector", "frameworks", "last_oom", "rank"}
)
COUNT = st.none() | st.integers(0, 2**63 - 1)
RANK = {"number": 3, "size": 8, "job": "n0:29500"}


def finite(value: object) -> bool:
    """Tell whether JSON can write a value; NaN and infinity refuse a whole message."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def device(framework: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a framework's figures of a device."""
    return st.fixed_dictionaries(
        {"ordinal": st.integers(0, 7)},
        optional=dict.fromkeys((*REPORTING_FRAMEWORKS[framework].figures, "managed", "new"), COUNT),
    )


FRAMEWORKS = st.lists(
    st.sampled_from(sorted(REPORTING_FRAMEWORKS)).flatmap(
        lambda name: st.fixed_dictionaries(
            {
                "framework": st.just(name),
                "devices": st.lists(device(name), max_size=3, unique_by=lambda each: each["ordinal"]),
            },
            optional={"policy": st.text(), "allocator": st.text(), "supported": st.booleans()},
        )
    ),
    max_size=3,
    unique_by=lambda each: each["framework"],
)
WHOLE = st.fixed_dictionaries(
    {"version": st.just(1), "sequence": st.integers(0, 2**40), "interval": st.floats(0.1, 60)},
    optional={
        "dropped": COUNT,
        "python": st.text(),
        "visible": st.fixed_dictionaries({"CUDA_VISIBLE_DEVICES": st.none() | st.text(max_size=20)}),
        "errors": st.dictionaries(st.text(max_size=5), COUNT, max_size=3),
        "collector": st.fixed_dictionaries({"enabled": st.booleans(), "collections": COUNT}),
        "frameworks": FRAMEWORKS,
        "last_oom": st.fixed_dictionaries(
            {
                "time": st.floats(0, 2e9),
                "framework": st.sampled_from(sorted(REPORTING_FRAMEWORKS)),
                "verdict": st.text(),
            }
        ),
        "rank": st.fixed_dictionaries({"number": COUNT, "size": COUNT, "job": st.text()}),
        "something new": JSON.filter(finite),
    },
)


def read(data: bytes) -> AgentReport | None:
    """Read a message; None when it is refused, for a reason that is counted."""
    try:
        return read_report(parse(data))
    except RefusedError as error:
        if error.reason not in REASONS:
            raise
        return None


@given(st.binary(max_size=300))
@example(b"[" * MAX_MESSAGE_BYTES)
@example(b'{"version":1,"a":' * 3000)
@example(b'{"version":1,"sequence":' + b"9" * 60_000 + b"}")
@example(b'{"version":1,"sequence":1,"interval":1e999}')
@example(b'{"version":1,"sequence":1,"interval":NaN}')
@example(b'{"version":1,"sequence":1,"interval":1,"collector":"\\ud800"}')
@example(b'{"version":1,"sequence":1,"interval":1,"collector":{"\\ud800":1}}')
@example(b'{"version":true,"sequence":1,"interval":1}')
@example(b'{"version":1,"sequence":1,"interval":1,"agent":"\xff"}')
@example(b"x" * (MAX_MESSAGE_BYTES + 1))
def test_bytes_of_any_kind_are_refused_in_order(data: bytes) -> None:
    """No message raises anything but a refusal for a known reason."""
    assert read(data) is None


@given(st.dictionaries(st.sampled_from(KEYS), JSON), st.sampled_from(["torch", "jax"]), JSON)
def test_values_of_any_kind_never_surprise(some: dict[str, Any], framework: str, device: object) -> None:
    """A message with any JSON in the known places is read or refused, and what is read has legal values."""
    message = report(**some)
    if "frameworks" not in some:
        message["frameworks"] = [{"framework": framework, "devices": [device]}]
    found = read(json.dumps(message).encode())
    if found is not None:
        for each in found.frameworks:
            for told in each.devices:
                assert all(type(value) is int and value >= 0 for value in told.figures.values())
        assert all(len(text) <= MAX_TEXT_CHARS for text in (found.agent or "", found.python or ""))
        assert read(json.dumps(plain(found)).encode()) == found


@given(WHOLE)
def test_a_report_that_is_written_is_read_again(message: dict[str, Any]) -> None:
    """A valid message is accepted; writing it and reading it again changes nothing."""
    found = sure(read(json.dumps(message).encode()))
    assert found.sequence == message["sequence"]
    assert read(json.dumps(plain(found)).encode()) == found


@given(WHOLE, WHOLE, st.booleans())
def test_what_was_read_before_is_no_news(first: dict[str, Any], second: dict[str, Any], same: bool) -> None:
    """A report that follows another one is what it is alone, whether the frameworks are the same or not."""
    if same:
        second["frameworks"] = json.loads(json.dumps(first.get("frameworks")))
    before = read_report(first)
    found = read_report(second, before)
    assert found == read_report(second)
    if same:
        assert found.frameworks is before.frameworks


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(({"version": 2}, "version"), ({"version": 1.5}, "version"), ({"sequence": None}, "format")),
        *(({"sequence": True}, "format"), ({"interval": 0}, "format"), ({"interval": 1e9}, "format")),
        *(({"frameworks": {}}, "format"), ({"frameworks": [torch(), torch()]}, "format")),
        ({"frameworks": [torch(reserved=-1)]}, "format"),
        ({"frameworks": [torch(reserved=2**63)]}, "format"),
        ({"frameworks": [{"framework": "torch", "devices": [{}]}]}, "format"),
        ({"frameworks": [{"framework": "torch", "devices": [{"ordinal": 0}, {"ordinal": 0}]}]}, "format"),
        ({"frameworks": [{"framework": "torch", "supported": 1}]}, "format"),
        ({"frameworks": [{"framework": "torch", "devices": [{"ordinal": n} for n in range(65)]}]}, "limits"),
        ({"errors": {f"p{number}": 1 for number in range(17)}}, "limits"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused_and_why(change: dict[str, Any], reason: str) -> None:
    """Each kind of invalid message is refused for its own reason."""
    with pytest.raises(RefusedError) as refused:
        read_report(parse(json.dumps({**report(), **change}).encode()))
    assert refused.value.reason == reason


def test_limits_of_a_report() -> None:
    """Texts are cut and harmless, the maximum of devices is accepted, a rank of another kind is not."""
    found = read_report(parse(json.dumps(report(agent="\x1b[31m\ud800é" + "x" * 1000)).encode()))
    assert sure(found.agent).startswith("?[31m?é")
    assert len(sure(found.agent)) == MAX_TEXT_CHARS
    jax = {"framework": "jax", "devices": [{"ordinal": number} for number in range(MAX_DEVICES)]}
    found = read_report(parse(json.dumps(report(frameworks=[jax])).encode()))
    assert len(found.frameworks[0].devices) == MAX_DEVICES
    assert read(json.dumps(report(rank=3)).encode()) is None
    assert read(json.dumps(report(rank={**RANK, "number": "3"})).encode()) is None


def test_what_a_newer_agent_says_is_passed_over() -> None:
    """Unknown keys, frameworks, figures and policies are not errors, and are not shown."""
    new = {**torch(future=1), "policy": "telepathy"}
    others = [{"framework": name} for name in ("new", [1], {"a": 1}, None)]
    found = read_report(parse(json.dumps(report(frameworks=[new, *others], more=[])).encode()))
    assert [each.framework for each in found.frameworks] == ["torch"]
    assert found.frameworks[0].policy is None
    assert "future" not in found.frameworks[0].devices[0].figures


def test_what_need_not_be_understood_costs_itself() -> None:
    """Names that we do not know may have any value, and null is as good as absent."""
    new = {
        **torch(
            reserved=5, future=[1], in_use="of another framework", categories={"new": "x", "gradients": 3}
        ),
        "settings": {"max_split_size_mb": "128", "new": 5, "expandable_segments": True},
        "version": None,
    }
    told = report(
        frameworks=[new], errors={"torch": None, "A new one": "x", "\ud800": [], "jax": 2},
        consents=["reclaim", 5], collector=None,
        visible={"CUDA_VISIBLE_DEVICES": None, "NEW": 1}, last_oom={"ordinal": 0},
    )  # fmt: skip
    found = read_report(parse(json.dumps(told).encode()))
    (framework,) = found.frameworks
    assert framework.devices[0].figures["reserved"] == 5
    assert "in_use" not in framework.devices[0].figures
    assert (framework.settings, framework.version) == ({"max_split_size_mb": "128"}, None)
    assert (found.errors, found.consents, found.last_oom) == ({"jax": 2}, ("reclaim",), None)
    assert found.visible == {"CUDA_VISIBLE_DEVICES": None, "CUDA_DEVICE_ORDER": None}


@pytest.mark.parametrize(
    ("changes", "rank"),
    [
        ({}, ReportedRank(3, 8, "n0:29500")),
        ({"job": ":29500"}, ReportedRank(3, 8, "gpu-7:29500")),
        ({"job": ":/tmp/meet"}, ReportedRank(3, 8, "gpu-7:/tmp/meet")),
        ({"job": "::abcd:29500"}, ReportedRank(3, 8, "::abcd:29500")),  # a global address of IPv6
        ({"job": "a\nb:1"}, ReportedRank(3, 8, "a?b:1")),
        ({"job": None}, ReportedRank(3, 8, "")),
        ({"number": 8}, None),
        ({"number": 0, "size": 1}, None),
        ({"number": None}, None),
        ({"size": 2**40}, None),
    ],
)
def test_a_rank_is_one_of_a_job_of_several(changes: dict[str, Any], rank: ReportedRank | None) -> None:
    """A rank that cannot be is not known; a rendezvous that is local to a node gets the node's name."""
    told = sure(read(json.dumps(report(rank={**RANK, **changes})).encode()))
    assert locate_rank(told, "gpu-7").rank == rank
