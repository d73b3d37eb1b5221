"""A router that starts beside a running cluster: its view is whole before it takes work, within a second."""

from __future__ import annotations

import asyncio

from services.router.service import WARM_UP_S
from tests.simulation.cluster import Cluster
from tests.simulation.errors import errors_noticed
from tests.simulation.loop import VirtualLoop
from tests.simulation.nodes import MODEL
from tests.simulation.stories import story


def test_it_sees_every_worker_before_it_takes_work() -> None:
    assert WARM_UP_S < 1.0
    loop = VirtualLoop()
    cluster = Cluster(loop, story(prefill=3, decode=3, both=2))
    try:
        for name in cluster.plan.names:
            if name != "r2":
                cluster.start(name)
        loop.run_until_complete(asyncio.sleep(3.0))
        late = cluster.start("r2")
        loop.run_until_complete(asyncio.sleep(WARM_UP_S))
        assert late.router is not None
        seen = {worker.process for worker in late.router.view.workers(MODEL)}
        assert seen == {node.process.id for name, node in cluster.nodes.items() if name[0] in "pdb"}
    finally:
        with errors_noticed([]):
            loop.run_until_complete(cluster.close())
        loop.close()
