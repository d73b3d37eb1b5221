"""Responses and conversations as rows: histories, the one end of a response, tenants, writers at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from schemas.errors import PayloadTooLarge
from services.edge.store import responses as store
from services.edge.store.conversations import SqlConversationStore
from services.edge.store.database import Database
from services.edge.store.jobs import SqlJobStore
from services.edge.store.records import Checkpoint, End, Facts, JobState
from services.edge.store.responses import SqlResponseStore, StoredResponse


@pytest.fixture
def responses(database: Database) -> SqlResponseStore:
    return SqlResponseStore(database)


@pytest.fixture
def conversations(database: Database) -> SqlConversationStore:
    return SqlConversationStore(database)


def response(name: str, previous: str | None = None, *, running: bool = False, conversation: str | None = None) -> StoredResponse:
    about: dict[str, Any] = {
        "id": name,
        "previous_response_id": previous,
        "status": "completed",
        "output": [{"id": f"out-{name}"}],
    }
    about["conversation"] = None if conversation is None else {"id": conversation}
    return StoredResponse(about, [{"id": f"in-{name}"}], running)


async def test_a_history_is_told_from_its_beginning(responses: SqlResponseStore) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("b2", "a")):
        await responses.add("t", response(name, previous))
    found, missing = await responses.history("c", "t")
    assert ([one.id for one in found], missing) == (["a", "b", "c"], None)
    assert found[0].items == [{"id": "in-a"}, {"id": "out-a"}]
    assert await responses.get("a", "t") == response("a")
    await responses.delete("a", "t")
    found, missing = await responses.history("c", "t")
    assert missing == "a"
    assert (await responses.history("c", "other"))[1] == "c"


async def test_a_history_ends_at_another_tenants(responses: SqlResponseStore) -> None:
    await responses.add("other", response("a"))
    await responses.add("t", response("b", "a"))
    assert (await responses.history("b", "t"))[1] == "a"


@pytest.mark.parametrize(("bound", "value"), [("MOST_BYTES", 40), ("LONGEST", 1)])
async def test_what_a_history_makes_an_edge_read_is_bounded(
    responses: SqlResponseStore, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        await responses.add("t", response(name, previous))
    monkeypatch.setattr(store, bound, value)
    assert len((await responses.history("b", "t"))[0]) == 2
    with pytest.raises(PayloadTooLarge) as refused:
        await responses.history("c", "t")
    assert refused.value.param == "previous_response_id"


async def test_it_ends_once_and_its_conversation_hears_of_it_once(
    responses: SqlResponseStore, conversations: SqlConversationStore
) -> None:
    await conversations.create("c", "t", {}, [])
    running = response("a", running=True, conversation="c")
    await responses.add("t", running)
    assert await responses.left(9) == [("a", "t")]
    ends = [{**running.object, "output": [{"id": f"out-{number}"}]} for number in range(5)]
    kept = await asyncio.gather(*(responses.end("t", end) for end in ends))
    assert len({str(one) for one in kept}) == 1
    assert await responses.left(9) == []
    assert await conversations.items("c", "t") == [{"id": "in-a"}, *(kept[0] or {})["output"]]


async def test_those_whose_jobs_run_are_not_left(responses: SqlResponseStore, database: Database) -> None:
    jobs = SqlJobStore(database)
    for job in ("1", "2", "3"):
        await jobs.create(job, "t", b"", "e", 60.0)
        await responses.add("t", response(f"resp_{job}", running=True))
    await jobs.checkpoint("e", [Checkpoint("2", Facts(), end=End(JobState.FINISHED))], 60.0)
    await jobs.delete("3", "t")
    assert await responses.left(9) == [("resp_2", "t"), ("resp_3", "t")]


async def test_a_deleted_one_does_not_end(responses: SqlResponseStore) -> None:
    running = response("a", running=True)
    await responses.add("t", running)
    assert not await responses.delete("a", "other")
    assert await responses.delete("a", "t")
    assert await responses.end("t", running.object) is None


async def test_old_ones_are_forgotten(responses: SqlResponseStore) -> None:
    await responses.add("t", response("a"))
    assert await responses.sweep(60.0) == 0
    assert await responses.sweep(-60.0) == 1
    assert await responses.get("a", "t") is None


@pytest.mark.parametrize("name", ["", "a\0", "\ud800", "é", "x" * 200])
async def test_names_that_no_database_takes_are_not_there(
    responses: SqlResponseStore, conversations: SqlConversationStore, name: str
) -> None:
    assert await responses.get(name, "t") is None
    assert (await responses.history(name, "t")) == ([], name)
    assert not await conversations.delete(name, "t")
    assert await conversations.items(name, "t") is None


async def test_items_of_many_writers_are_all_there(conversations: SqlConversationStore) -> None:
    await conversations.create("c", "t", {}, [])
    await asyncio.gather(*(conversations.append("c", "t", [{"id": f"{n}-{k}"} for k in range(3)]) for n in range(10)))
    items = await conversations.items("c", "t")
    assert items is not None
    names = [item["id"] for item in items]
    assert sorted(names) == sorted(f"{n}-{k}" for n in range(10) for k in range(3))
    assert all(names[at][0] == names[at + 1][0] == names[at + 2][0] for at in range(0, 30, 3))


async def test_an_id_names_one_item_whoever_adds_it_at_the_same_time(conversations: SqlConversationStore) -> None:
    """What is refused adds none of its items."""
    await conversations.create("c", "t", {}, [{"id": "first"}])
    told = await asyncio.gather(*(conversations.append("c", "t", [{"id": f"own-{n}"}, {"id": "same"}]) for n in range(5)))
    assert sorted(told, key=len) == [frozenset(), *[frozenset({"same"})] * 4]
    items = await conversations.items("c", "t")
    assert items is not None
    assert [item["id"] for item in items] == ["first", f"own-{told.index(frozenset())}", "same"]
    assert await conversations.append("c", "t", [{"id": "first"}, {"id": "same"}]) == {"first", "same"}
    assert await conversations.append("c", "other", [{"id": "new"}]) is None


async def test_a_response_does_not_add_what_was_added_meanwhile(
    responses: SqlResponseStore, conversations: SqlConversationStore
) -> None:
    """Its client was answered: it can be refused no more."""
    await conversations.create("c", "t", {}, [])
    same = [{**response(name, conversation="c").object, "output": [{"id": f"out-{name}"}]} for name in ("a", "b")]
    await asyncio.gather(*(responses.add("t", StoredResponse(about, [{"id": "in"}], False)) for about in same))
    items = await conversations.items("c", "t")
    assert items is not None
    assert items[0] == {"id": "in"}
    assert sorted(item["id"] for item in items[1:]) == ["out-a", "out-b"]
