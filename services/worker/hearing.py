"""What edges and supervisors say to a worker: control of runs, signs of life, deaths.

Owns nothing; it turns messages into calls of the worker.
"""

from __future__ import annotations

from schemas.codec import SchemaRange
from schemas.control import Control, Verb
from schemas.state import Cause, Death, EdgeBeat
from services.bus.interface import Msg
from services.bus.typed import Refusals, listen
from services.worker.detached import attach
from services.worker.upkeep import drop_jobs_of_gone_edges
from services.worker.worker import Worker


async def hear(worker: Worker, refusals: Refusals) -> None:
    """Listen from now on. Raises `Disconnected`."""
    hearing, bus, subjects = Hearing(worker), worker.bus, worker.subjects
    await listen(bus, subjects.control(bus.process), Control, hearing.on_control, refusals=refusals)
    await listen(bus, subjects.edge_state_any(), EdgeBeat, hearing.on_edge_beat, refusals=refusals)
    await listen(bus, subjects.dead_any(), Death, hearing.on_death, refusals=refusals)


class Hearing:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def on_control(self, control: Control, _: Msg) -> None:
        worker, run = self._worker, self._worker.runs.get(control.run)
        match control.verb:
            case Verb.CANCEL if run is not None and control.choices is not None:
                worker.stop_choices(run, control.choices)
            case Verb.CANCEL if run is not None and control.by_operator:
                worker.drop_by_operator(run)
            case Verb.CANCEL if run is not None:
                worker.drop(run)
            case Verb.CANCEL:
                self._cancel_elsewhere(control)
            case Verb.REPLAY:
                worker.outbox.replay(control.run, control.positions)
            case Verb.ATTACH if run is not None and run.job.detached:
                attach(worker, run, control)
            case Verb.ATTACH:
                self._attach_elsewhere(control)

    def on_edge_beat(self, beat: EdgeBeat, _: Msg) -> None:
        # An edge writes what the routers can read too, whom we do not hear.
        readable = SchemaRange(oldest=beat.schemas.oldest, newest=min(beat.schemas.newest, beat.writes))
        self._worker.bus.dialect.hear(beat.process, readable)
        if beat.left:
            self._worker.bus.dialect.gone(beat.process)
        self._worker.edges.beat(beat)

    def on_death(self, death: Death, _: Msg) -> None:
        if death.cause is not Cause.DISCONNECTED:
            self._worker.bus.dialect.gone(death.process)
            self._worker.edges.died(death.process)
            drop_jobs_of_gone_edges(self._worker)

    def _attach_elsewhere(self, control: Control) -> None:
        """A run that was handed on; of one that ended its edge hears by the digests."""
        process = self._worker.runs.forward_to(control.run)
        if process:
            self._worker.tell(process, control)

    def _cancel_elsewhere(self, control: Control) -> None:
        worker, process = self._worker, self._worker.runs.forward_to(control.run)
        if process:
            worker.tell(process, control)
        elif worker.runs.known(control.run):
            worker.outbox.replay(control.run)  # its terminal event was lost
        elif control.choices is None:
            worker.runs.cancel_early(control.run)
            for hook in worker.on_unknown_cancel:
                hook(control.run)
