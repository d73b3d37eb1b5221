"""Models, aliases and what is listed: who answers to which name, and what the caller is told of it."""

from __future__ import annotations

import openai
import pytest

from tests.edge.fakes import Api
from tests.edge.selection.rig import MODELS, api, chosen, sdk


async def test_each_model_has_its_own_text() -> None:
    edge = api()
    for at, model in enumerate(MODELS):
        response = await edge.post(model=model)
        assert response.json()["model"] == model
        assert chosen(response) == (model, "named")
        assert (edge.jobs.draft.model, edge.jobs.draft.sampling.temperature) == (model, 1 - at / 10)


async def test_an_alias_is_answered_by_its_model() -> None:
    edge = api()
    response = await edge.post(model="fast")
    assert response.json()["model"] == edge.jobs.draft.model == "a"
    assert chosen(response) == ("a", "alias")
    assert (await edge.post(model="slow")).json()["error"]["code"] == "model_not_found"


async def test_one_model_without_a_selection_is_what_it_was() -> None:
    edge = Api()
    assert chosen(await edge.post()) == ("tiny", "named")
    assert (await edge.post(model="auto")).status_code == 404


async def test_what_is_listed() -> None:
    edge = api()
    edge.jobs.alive = {"a", "b"}
    async with sdk(edge) as client:
        listed = {model.id: model for model in (await client.models.list()).data}
        assert list(listed) == ["a", "b", "c", "fast", "chat", "auto"]  # others answer for c
        assert getattr(listed["fast"], "root", None) == "a"
        assert (await client.models.retrieve("auto")).id == "auto"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("slow")


async def test_a_folder_may_be_called_anything() -> None:
    response = await Api(["modèle ☃"]).post(model="modèle ☃")
    assert response.headers["x-headrace-model"] == "mod%C3%A8le%20%E2%98%83"
    assert response.json()["model"] == "modèle ☃"


async def test_ready_for_one_or_for_any() -> None:
    edge = api()
    edge.jobs.alive = {"b"}
    async with edge.client() as client:
        paths = ["/ready", "/ready?model=b", "/ready?model=a", "/ready?model=nothing"]
        assert [(await client.get(path)).status_code for path in paths] == [200, 200, 503, 503]
        edge.jobs.alive = set()
        assert (await client.get("/ready")).status_code == 503
