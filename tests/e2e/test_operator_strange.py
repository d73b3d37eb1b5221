"""What no operator should ask, asked of every verb of every service: each gets a refusal that says what is wrong, and it counts.

The verbs are those that the services name themselves, so a new one is asked too. Meanwhile a stream goes on as if nothing was.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.chaos.streams import Question, ask, clients
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import Operator, operator
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PACED = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.05"}
HUGE = 7_000_000
NEVER_READ = [
    b"\0",
    b"\xff\xfe",
    b"x",
    b"{",
    b"null",
    b"0",
    b'""',
    b"[]",
    b"[{}]",
    b"NaN",
    b'{"' + b"x" * HUGE + b'": 1}',
    b"x" * HUGE,
    b"[" * 1_000_000,
    b'{"a":' * 500_000,
    b'{"job": "\xff"}',
    b'{"worker": "x", "job": "x"}',
    b'{"drain": true}',
]
BY_VERB: dict[str, list[dict[str, Any]]] = {
    "jobs": [{"limit": each} for each in (0, -1, 1001, 1.5, "1", None, 10**30)]
    + [{"after": 1}, {"older_s": -1}, {"older_s": "x"}, {"older_s": None}],
    "cancel": [{}] + [{"job": each} for each in ("", "x", "*", "f" * HUGE, None, 1, ["0" * 32])],
    "quarantine": [{"clear": each} for each in ("0" * 32, "*", "x" * HUGE, None, 1)] + [{"limit": 0}],
    "eject": [{}] + [{"worker": each} for each in ("", "x", "d1-0000000000000", "x" * HUGE, None, ["d1"])],
    "explain": [{}, {"model": "tiny"}, {"tokens": 1}]
    + [{"model": "tiny", "tokens": each} for each in (0, -1, 10**9, [], ["x"], [-1], [2**32], "1", None)]
    + [{"model": "tiny", "tokens": 1} | each for each in ({"tier": "x" * HUGE}, {"lane": 16}, {"salt": "z"}, {"queue_s": 0})],
}
BY_VERB["readmit"] = BY_VERB["eject"]


async def test_every_verb_refuses_what_is_no_question(scripted_stack: StartScripted) -> None:
    up = scripted_stack(**PACED)
    question = Question(0, 300)
    async with operator(up) as op, clients(up.url) as client:
        undisturbed = await ask(client, question)
        streaming = asyncio.create_task(ask(client, question))
        for role in ("edge", "router", "prefill", "decode"):
            process = await op.one(role)
            for verb, subject in (await _endpoints(op, role, process)).items():
                for data in (*NEVER_READ, *(json.dumps(each).encode() for each in BY_VERB.get(verb, ()))):
                    await _refused(op, role, process, subject, data)
            if role != "router":  # who can only pass it on
                unknown = await op.ask(f"hr.admin.{role}.{process}.cancel", job="0" * 32)
                assert unknown["error"]["code"] == "not_found"
        assert (await streaming).said == undisturbed.said
        assert (await op.ask(f"hr.admin.edge.{await op.one('edge')}.status"))["draining"] is False
        await op.assert_clean()


async def _refused(op: Operator, role: str, process: str, subject: str, data: bytes) -> None:
    before = await _errors(op, role, process, subject)
    answer = await op.client.request(subject, data, timeout=PATIENCE_S)
    asked = f"{subject} {data[:60]!r}"
    error = json.loads(answer.data)["error"]
    assert answer.headers, asked
    assert answer.headers["Nats-Service-Error-Code"] in ("400", "404"), (asked, error)
    assert error["message"], asked
    assert len(answer.data) < 20_000, asked
    assert await _errors(op, role, process, subject) == before + 1, asked


async def _endpoints(op: Operator, role: str, process: str) -> dict[str, str]:
    """The subject of each verb of this process."""
    said = await op.ask(f"$SRV.INFO.headrace-{role}.{process}")
    return {each["name"]: each["subject"] for each in said["endpoints"]}


async def _errors(op: Operator, role: str, process: str, subject: str) -> int:
    said = await op.ask(f"$SRV.STATS.headrace-{role}.{process}")
    return next(int(each["num_errors"]) for each in said["endpoints"] if each["subject"] == subject)
