"""What must be gone when every job has ended: runs, blocks, tasks, subscriptions."""

from __future__ import annotations

from collections import Counter

from tests.simulation.cluster import Cluster
from tests.simulation.nodes import Node


class Leftovers:
    """`take_baseline` while nothing runs yet; `find` names what there is more of."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._tasks: dict[str, Counter[str]] = {}
        self._subscriptions: dict[str, int] = {}

    def take_baseline(self) -> None:
        """By kind of process; all of one kind look alike."""
        for node in self._cluster.nodes.values():
            self._tasks[node.name[0]] = _tasks(node)
            self._subscriptions[node.name[0]] = self._listening(node)

    def find(self) -> list[str]:
        found = []
        for node in self._cluster.nodes.values():
            if node.alive and node.process.running:
                found += [f"{node.process.id}: {what}" for what in (*_held(node), *self._more(node))]
        return found

    def _more(self, node: Node) -> list[str]:
        kind = node.name[0]
        more = [f"task {name} x{count}" for name, count in (_tasks(node) - self._tasks[kind]).items()]
        subscriptions = self._listening(node)
        if subscriptions > self._subscriptions[kind]:
            more.append(f"{subscriptions} subscriptions instead of {self._subscriptions[kind]}")
        return more

    def _listening(self, node: Node) -> int:
        return self._cluster.network.broker.subscriptions(node.bus)


def _tasks(node: Node) -> Counter[str]:
    return Counter(task.get_coro().__qualname__ for task in node.process.tasks())  # type: ignore[union-attr]


def _held(node: Node) -> list[str]:
    held = []
    if node.edge is not None and len(node.edge):
        held.append(f"{len(node.edge)} jobs")
    if node.detached is not None and len(node.detached):
        held.append(f"{len(node.detached)} detached jobs")
    if node.worker is not None:
        pool = node.worker.engine.pool
        held += [f"run {run.id:x} {run.state}" for run in node.worker.runs]
        held += [f"{type(holder).__name__} {holder.run:x}" for holder in pool.holders]
        if pool.free + pool.cached != pool.total:
            held.append(f"{pool.held} blocks")
        if pool.swap.used:
            held.append(f"{pool.swap.used} swapped blocks")
    return held
