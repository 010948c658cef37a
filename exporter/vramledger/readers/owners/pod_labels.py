"""Keep the labels of the pods that concern us; no sample waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from vramledger.logs import fields, log
from vramledger.model.label import label_text
from vramledger.model.reading import PodLabels, ProcessFacts, ProcessRow, Scheduler
from vramledger.readers.bounded import BoundedReader
from vramledger.readers.owners.pod_api import Labels, PodApiError, Pods

READ_INTERVAL = 60.0
"""Seconds between two requests: labels of a running pod hardly change."""

SPACING = 5.0
"""Seconds after a request at which a pod that is new since then leads to the next one."""

KEEP = 300.0
"""Seconds for which labels are kept while neither source gives them: an API server starts in less."""

STUCK_AFTER = 30.0
"""Seconds after which a request is given up: two addresses that answer nothing take ten."""

MAX_PODS = 512
"""Pods of which labels are kept; a node has a few hundred at most."""

Pod = tuple[str, str]
"""Namespace and name."""


class HolderPods:
    """Know which pods hold memory or have a device reserved."""

    def __init__(self) -> None:
        self._pods: dict[tuple[int, int], Pod] = {}

    def update(
        self,
        rows: Iterable[ProcessRow],
        unseen: Collection[int],
        facts: Iterable[ProcessFacts],
        schedulers: Iterable[Scheduler],
    ) -> set[Pod]:
        """Return the pods of one sample; facts come once for each process.

        A pid that NVML lists and /proc does not show any more has the pod that its process had.
        """
        for each in facts:
            if each.owner is not None and each.owner.pod and each.owner.namespace:
                self._pods[each.pid, each.start] = (each.owner.namespace, each.owner.pod)
        present = {(row.pid, row.start) for row in rows}
        self._pods = {
            identity: pod
            for identity, pod in self._pods.items()
            if identity in present or identity[0] in unseen
        }
        granted = (grant for each in schedulers for grant in each.grants if grant.type == "pod")
        reserved = (grant.name.partition("/") for grant in granted)
        return {*self._pods.values(), *((namespace, pod) for namespace, _, pod in reserved)}


class _Answer(NamedTuple):
    pods: Pods | None
    problem: str
    seconds: float


class PodLabelReader:
    """Ask in a thread, and only while there are pods that concern us."""

    def __init__(
        self,
        read: Callable[[], Pods],
        labels: tuple[str, ...],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; nobody is asked before :meth:`update` names a pod.

        Args:
            read: returns the labels of this node's pods, or raises a :class:`PodApiError`.
            labels: the allow-list.
            clock: monotonic seconds.
        """
        self._read = read
        self._labels = labels
        self._clock = clock
        self._requests: BoundedReader[_Answer] = BoundedReader(
            stuck_after=STUCK_AFTER, max_stuck=1, clock=clock
        )
        self._known: dict[Pod, Labels] = {}
        self._asked_for: frozenset[Pod] = frozenset()
        self._asked = float("-inf")
        self._answered = float("-inf")
        self._problem = ""
        self.health: tuple[bool, float] | None = None
        """Whether the last request succeeded, and its seconds; None before its end, and without any pod."""

    def update(self, wanted: Collection[Pod]) -> tuple[PodLabels, ...]:
        """Return what is known of these pods, and have it read again when it is time.

        A pod that has ended keeps the labels that it had, as long as it is wanted.
        """
        pods = frozenset(sorted(wanted)[:MAX_PODS])
        for answer in self._requests.collect(0.0):
            self._accept(answer)
        self._known = {pod: labels for pod, labels in self._known.items() if pod in pods}
        if not pods:
            self.health = None
            return ()
        age = self._clock() - self._asked
        if not self._requests.busy and (age >= READ_INTERVAL or (age >= SPACING and pods - self._asked_for)):
            self._asked, self._asked_for = self._clock(), pods
            self._requests.submit("pods", self._request, lambda: _Answer(None, "no answer", STUCK_AFTER))
        return tuple(
            PodLabels(*pod, tuple((name, self._known[pod].get(name)) for name in self._labels))
            for pod in sorted(self._known)
        )

    def _request(self) -> _Answer:
        begun = self._clock()
        try:
            return _Answer(self._read(), "", self._clock() - begun)
        except PodApiError as error:
            return _Answer(None, str(error), self._clock() - begun)

    def _accept(self, answer: _Answer) -> None:
        self.health = (answer.pods is not None, answer.seconds)
        if answer.pods is not None:
            self._answered = self._clock()
            for pod in self._asked_for & answer.pods.keys():
                self._known[pod] = {
                    name: label_text(value)
                    for name, value in answer.pods[pod].items()
                    if name in self._labels
                }
        elif self._clock() - self._answered > KEEP:
            self._known.clear()
        if answer.problem and answer.problem != self._problem:
            log.warning("Cannot read labels of pods", extra=fields(err=answer.problem))
        elif self._problem and not answer.problem:
            log.info("Reading labels of pods again")
        self._problem = answer.problem
