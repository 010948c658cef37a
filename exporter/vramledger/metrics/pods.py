"""Declare the family of labels of pods; its label names follow from the allow-list."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from msgspec.structs import replace

from vramledger.metrics.families import PREFIX, Collected, Family
from vramledger.model.snapshot import Snapshot

POD_LABELS = Family(
    PREFIX + "pod_labels_info",
    ("namespace", "pod"),
    "The labels of a pod that --pods.labels names, each as label_NAME, if the pod holds memory or has a "
    "device reserved; from the kubelet or the API server, read every minute.",
    "pods",
    source="`metadata.labels` of the pods of this node, from the kubelet's `/pods` or the API server",
    absent="when `--pods.labels` is not given, and when neither gives the pod's labels",
)

FAMILIES = (POD_LABELS,)

_INVALID = re.compile(r"[^a-zA-Z0-9_]")
_HUMP = re.compile(r"([a-z0-9])([A-Z])")


def label_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the label of the metric for each label of pods, by the rules of kube-state-metrics.

    What is the same in ``snake_case`` gets ``_conflict1``, ``_conflict2`` at its end, over the whole allow-
    list: so a label has the same name for every pod.
    """
    same: dict[str, list[str]] = {}
    for key in sorted(keys):
        name = _HUMP.sub(r"\1_\2", _INVALID.sub("_", key)).lower()
        same.setdefault(f"label_{name}", []).append(key)
    names = {each[0]: name for name, each in same.items() if len(each) == 1}
    taken = {*same}
    for name, each in same.items():
        number = 0
        for key in each if len(each) > 1 else ():
            number += 1
            while f"{name}_conflict{number}" in taken:
                number += 1
            names[key] = f"{name}_conflict{number}"
            taken.add(names[key])
    return names


@lru_cache(maxsize=4)
def _family(keys: tuple[str, ...]) -> Family:
    names = label_names(keys)
    return replace(POD_LABELS, labels=(*POD_LABELS.labels, *(names[key] for key in keys)))


def collect(snapshot: Snapshot) -> Collected:
    """Return the labels of each pod; for Prometheus an empty label is one that the pod does not have."""
    if not snapshot.up or not snapshot.pods:
        return [(POD_LABELS, [])]
    keys = tuple(name for name, _ in snapshot.pods[0].labels)
    samples = [
        ((each.namespace, each.pod, *(value or "" for _, value in each.labels)), 1.0)
        for each in snapshot.pods
        if tuple(name for name, _ in each.labels) == keys
    ]
    return [(_family(keys), samples)]
