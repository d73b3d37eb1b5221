"""The chat API over a real NATS server with accounts: who is taken for whom, streams, and callers that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import MessageTooLarge, Overloaded
from schemas.job import Tier
from schemas.state import Capabilities
from schemas.subjects import Subjects
from services.cli.up.credentials import load_or_create
from services.cli.up.nats import NatsPlan, write_config
from services.edge.gate.limits import Limits
from services.edge.gate.records import AccountRecord
from services.edge.nats_api.presence import TRACE_EVERY_S
from services.edge.tenant import tenant
from services.settings.selection import SelectionSettings
from tests.edge.fakes import MODEL, Api, Script, says
from tests.edge.nats_rig import SECRET, Call, caller, edge
from tests.edge.test_template_variables import OFF, ON, THINKING, prompt
from tests.infra.accounts import AccountServer
from tests.ports import free_ports
from tests.text.tiny import byte_ids
from tests.waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AccountServer]:
    with AccountServer(tmp_path_factory.mktemp("nats"), tenants=("acme", "zenith")) as running:
        yield running


async def test_streamed_and_whole(server: AccountServer) -> None:
    async with edge(server) as api, caller(server, "acme") as client:
        api.jobs.default = says("hel", "lo")
        chunks = await (await Call(client).send(stream=True, stream_options={"include_usage": True})).stream()
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]) == "hello"
        assert chunks[-1]["usage"]["completion_tokens"] == 5
        whole = await (await Call(client).send()).one()
        assert whole["choices"][0]["message"]["content"] == "hello"


async def test_each_request_counts_once(server: AccountServer) -> None:
    async with edge(server) as api, caller(server, "acme") as client:
        await (await Call(client).send(stream=True)).stream()
        await (await Call(client).send()).one()
        await (await Call(client).send(model="none of ours")).one()
        api.jobs.scripts = [Script(refuse=Overloaded("x"))]
        await (await Call(client).send()).one()
        await until(lambda: sum(api.counted().values()) >= 4)
        assert api.counted() == {
            (MODEL, "stop", "200"): 2,
            ("unknown", "model_not_found", "404"): 1,
            (MODEL, "overloaded", "503"): 1,
        }


async def test_the_account_is_the_tenant(server: AccountServer) -> None:
    """Whatever the caller writes into the header: the server's word replaces it."""
    async with edge(server) as api:
        for name in ("acme", "zenith"):
            async with caller(server, name) as client:
                await (await Call(client).send({"Nats-Request-Info": '{"acc":"HEADRACE"}'}, user="other")).one()
                assert api.jobs.draft.salt == tenant(SECRET, f"nats:{name}").salt
        assert len({handle.draft.salt for handle in api.jobs.handles}) == 2


async def test_from_within_our_own_account_nothing_is_taken(server: AccountServer) -> None:
    async with edge(server) as api, caller(server, "plain") as client:
        call = await Call(client).send({"Nats-Request-Info": '{"acc":"acme"}'})
        assert (await call.one())["error"]["code"] == "permission_denied"
        assert call.headers["Nats-Service-Error-Code"] == "403"
        assert not api.jobs.handles


@pytest.mark.parametrize("stream", [True, False])
async def test_refusals_are_one_message(server: AccountServer, stream: bool) -> None:
    async with edge(server) as api, caller(server, "acme") as client:
        wrong = await Call(client).send(stream=stream, temperature=3)
        assert (await wrong.one())["error"]["param"] == "temperature"
        assert wrong.headers["Nats-Service-Error-Code"] == "400"
        api.jobs.scripts = [Script(refuse=Overloaded("full", retry_after=2.0))]
        full = await Call(client).send(stream=stream)
        assert (await full.one())["error"]["code"] == Overloaded.code
        assert (full.headers["Nats-Service-Error-Code"], full.headers["Retry-After"]) == ("503", "2")
        assert full.headers["Nats-Service-Error"] == "full"
        assert (len(wrong.got), len(full.got)) == (1, 1)


async def test_a_refusal_repeats_no_more_than_a_message_holds(server: AccountServer) -> None:
    async with edge(server), caller(server, "acme") as client:
        call = await Call(client).send(logit_bias={"x" * 3_000_000: 101})
        assert (await call.one())["error"]["param"].startswith("logit_bias.xxx")
        assert call.headers["Nats-Service-Error-Code"] == "400"
        odd = await Call(client).send(logit_bias={"\0\r\n\x1c\u2028 é": 101})
        assert (await odd.one())["error"]["type"] == "invalid_request_error"


async def test_an_answer_too_large_for_one_message_is_a_refusal(server: AccountServer) -> None:
    async with edge(server) as api, caller(server, "acme") as client:
        api.jobs.default = Script([byte_ids("x" * 9_000)])
        api.jobs.capabilities = Capabilities(logprobs=True)
        call = await Call(client).send(logprobs=True, top_logprobs=20)  # more than a kilobyte a token
        await until(lambda: call.got, timeout=4 * PATIENCE_S)
        assert (await call.one())["error"]["code"] == MessageTooLarge.code
        assert call.headers["Nats-Service-Error-Code"] == "413"
        assert len(call.got) == 1


async def test_a_failure_in_a_stream_is_a_message_then_the_end(server: AccountServer) -> None:
    async with edge(server) as api, caller(server, "acme") as client:
        api.jobs.scripts = [Script([byte_ids("x")], error=Overloaded("gone", retry_after=2.0))]
        chunks = await (await Call(client).send(stream=True)).stream()
        assert chunks[-1]["error"]["message"] == "gone"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_that_disconnects_stops_the_compute(server: AccountServer, stream: bool) -> None:
    async with edge(server) as api, caller(server, "acme") as client, caller(server, "acme") as other:
        api.jobs.default = Script([byte_ids("a")], finish=None)
        await Call(client).send(stream=stream)
        await until(lambda: api.jobs.handles)
        await Call(other).send(stream=stream)
        await until(lambda: len(api.jobs.handles) == 2)
        await client.close()
        await until(api.jobs.handles[0].cancelled.is_set)
        assert not api.jobs.handles[1].cancelled.is_set()
        await until(lambda: api.traffic.running == 1)


async def test_a_caller_that_unsubscribes_from_a_stream_stops_the_compute(server: AccountServer) -> None:
    """And one that listens does not, however often it is looked for."""
    async with edge(server) as api, caller(server, "acme") as client:
        api.jobs.default = Script([byte_ids("a")], finish=None, pause_s=0.05, forever=True)
        call, stays = await Call(client).send(stream=True), await Call(client).send(stream=True)
        await until(lambda: len(call.got) > 3 * TRACE_EVERY_S / 0.05)
        assert not any(handle.cancelled.is_set() for handle in api.jobs.handles)
        await call.subscription.unsubscribe()
        await until(api.jobs.handles[0].cancelled.is_set)
        seen = len(stays.got)
        await until(lambda: len(stays.got) > seen + 2 * TRACE_EVERY_S / 0.05)
        assert not api.jobs.handles[1].cancelled.is_set()


async def test_cancel_on_the_subject_that_the_first_message_names(server: AccountServer) -> None:
    async with edge(server) as api, caller(server, "acme") as client, caller(server, "zenith") as other:
        api.jobs.default = Script([byte_ids("a")], finish=None)
        call = await Call(client).send(stream=True)
        await until(lambda: call.got)
        subject = call.headers["Headrace-Cancel"]
        await other.publish(Subjects().chat_cancel("0" * 32), b"")  # a guess does nothing
        assert (await client.request(subject, b"", timeout=PATIENCE_S)).data == b"{}"
        await until(api.jobs.handles[0].cancelled.is_set)
        assert not (await call.stream())[-1]["choices"][0]["finish_reason"]


async def test_no_more_than_allowed_at_once(server: AccountServer) -> None:
    async with edge(server, most=1) as api, caller(server, "acme") as client:
        api.jobs.default = Script([byte_ids("a")], finish=None)
        await Call(client).send(stream=True)
        await until(lambda: api.jobs.handles)
        second = await Call(client).send(stream=True)
        assert (await second.one())["error"]["code"] == Overloaded.code
        assert second.headers["Retry-After"]


@pytest.mark.parametrize(
    ("limits", "code", "status"),
    [
        (Limits(requests_per_minute=1), "rate_limit_exceeded", "429"),
        (Limits(tokens_per_minute=450), "rate_limit_exceeded", "429"),
        (Limits(concurrent=1), "rate_limit_exceeded", "429"),
        (Limits(tokens_per_day=450), "rate_limit_exceeded", "429"),
        (Limits(output_tokens=200), "invalid_value", "400"),
        (Limits(tokens_per_month=200), "invalid_value", "400"),
    ],
)
async def test_an_accounts_limits_hold_for_all_its_callers_together_and_for_no_other(
    server: AccountServer, limits: Limits, code: str, status: str
) -> None:
    async with (
        edge(server, AccountRecord("acme", Tier.PAID, None, limits)) as api,
        caller(server, "acme") as one,
        caller(server, "acme") as another,
        caller(server, "zenith") as other,
    ):
        keeping = asyncio.create_task(api.budgets.run())
        api.jobs.default = Script([byte_ids("a")], finish=None)
        first = await Call(one).send(stream=True, max_tokens=400)
        await until(lambda: first.got)
        second = await Call(another).send(max_tokens=400)
        refused = second if status == "429" else first
        error = (await refused.one())["error"]
        assert (error["code"], refused.headers["Nats-Service-Error-Code"]) == (code, status)
        assert ("Retry-After" in refused.headers) == (status == "429")
        free = await Call(other).send(stream=True, max_tokens=400)
        await until(lambda: free.got)
        assert "Headrace-Cancel" in free.headers
        assert "Nats-Service-Error-Code" not in free.headers
        keeping.cancel()


async def test_a_refused_request_counts_unless_we_could_not_serve_it(server: AccountServer) -> None:
    told = AccountRecord("acme", Tier.PAID, None, Limits(requests_per_minute=2))
    async with edge(server, told) as api, caller(server, "acme") as client:
        api.jobs.scripts = [Script(refuse=Overloaded("full", retry_after=2.0))]
        codes = []
        for fields in ({}, {"temperature": 9}, {"model": "none of ours"}, {}):
            call = await Call(client).send(**fields)
            await call.one()
            codes.append(call.headers["Nats-Service-Error-Code"])
        assert codes == ["503", "400", "404", "429"]


async def test_what_broke_here_counts_as_no_request(server: AccountServer, monkeypatch: pytest.MonkeyPatch) -> None:
    told = AccountRecord("acme", Tier.PAID, None, Limits(requests_per_minute=1))
    async with edge(server, told) as api, caller(server, "acme") as client:
        with monkeypatch.context() as broken:
            broken.setattr(api.jobs, "start", None)
            assert (await (await Call(client).send()).one())["error"]["code"] == "internal_error"
        assert "choices" in await (await Call(client).send()).one()


async def test_a_budget_that_an_account_has_spent(server: AccountServer) -> None:
    told = AccountRecord("acme", Tier.PAID, None, Limits(tokens_per_day=350))
    async with edge(server, told) as api, caller(server, "acme") as client:
        keeping = asyncio.create_task(api.budgets.run())
        api.jobs.default = Script([byte_ids("x" * 250)])
        await (await Call(client).send(max_tokens=300)).one()
        refused = await Call(client).send(max_tokens=300)
        assert (await refused.one())["error"]["code"] == "insufficient_quota"
        assert int(refused.headers["Retry-After"]) >= 1
        assert [(each.tenant, each.used.completion_tokens) for each in api.usage.entries.values()] == [("nats:acme", 250)]
        keeping.cancel()


async def test_an_accounts_tier_and_models(server: AccountServer) -> None:
    told = AccountRecord("acme", Tier.FREE), AccountRecord("zenith", Tier.PAID, frozenset({"another"}))
    async with edge(server, *told) as api, caller(server, "acme") as acme, caller(server, "zenith") as zenith:
        await (await Call(acme).send()).one()
        assert api.jobs.draft.tier is Tier.FREE
        refused = await Call(zenith).send()
        assert (await refused.one())["error"]["param"] == "model"
        assert refused.headers["Nats-Service-Error-Code"] == "403"


async def test_variables_of_the_chat_template(server: AccountServer) -> None:
    async with edge(server, api=Api(template=THINKING)) as api, caller(server, "acme") as client:
        for variables, expected in (({"enable_thinking": False}, OFF), (None, ON)):
            await (await Call(client).send(chat_template_kwargs=variables)).one()
            assert prompt(api) == expected
        refused = await (await Call(client).send(chat_template_kwargs={"messages": []})).one()
        assert refused["error"]["param"] == "chat_template_kwargs.messages"


async def test_a_draining_edge_takes_nothing(server: AccountServer) -> None:
    async with edge(server) as api, caller(server, "acme") as client:
        api.traffic.draining = True
        call = await Call(client).send()
        assert (await call.one())["error"]["type"] == "server_error"
        assert call.headers["Nats-Service-Error-Code"] == "503"


def test_tenants_stay_the_operators_own(tmp_path: Path) -> None:
    plan = NatsPlan(tmp_path / "nats", *free_ports(2))
    passwords = load_or_create(tmp_path)
    write_config(plan, passwords)
    assert "acme" in (plan.folder / "tenants.conf").read_text()  # the example
    (plan.folder / "tenants.conf").write_text("# mine\n")
    write_config(plan, passwords)
    assert (plan.folder / "tenants.conf").read_text() == "# mine\n"
    assert "# mine" in (plan.folder / "permissions.conf").read_text()


async def test_which_model_answers(server: AccountServer) -> None:
    """As over HTTP: a hint in a header or in the body, what was chosen in the first message's headers."""
    auto = {"auto": {"small": "s", "large": "l"}, "fallback": {"l": {"to": ["s"]}}}
    several = Api(("s", "l"), SelectionSettings.model_validate(auto))
    async with edge(server, api=several) as api, caller(server, "acme") as client:
        asked = await Call(client).send({"Headrace-Hint": "large"}, model="auto", stream=True)
        assert {chunk["model"] for chunk in await asked.stream()} == {"l"}
        assert asked.headers["Headrace-Model"] == "l"
        assert asked.headers["Headrace-Model-Reason"] == "auto; size=large; rule=hint"
        api.jobs.alive = {"s"}
        asked = await Call(client).send(model="auto", metadata={"headrace_hint": "large"})
        assert (await asked.one())["model"] == asked.headers["Headrace-Model"] == "s"
        assert asked.headers["Headrace-Fallback"] == "l; reason=no_worker"
