"""Who answers, as a table and as properties."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import (
    BusUnavailable,
    ContextLengthExceeded,
    EdgeFull,
    EdgeUnavailable,
    HeadraceError,
    InsufficientQuota,
    InvalidRequest,
    ModelLoading,
    ModelNotFound,
    NoWorker,
    Overloaded,
    PermissionDenied,
    QueueExpired,
    RateLimited,
    StoreUnavailable,
    Unavailable,
)
from services.edge.selection.policy import Names, must_be_offered, offered, plan
from services.settings.selection import Features, SelectionSettings
from services.settings.selection_check import check_selection

MODELS = ("a", "b", "c")
SELECTION = SelectionSettings.model_validate(
    {
        "aliases": {"fast": "quick", "quick": "a", "chat": "auto"},
        "auto": {
            "small": "fast",
            "large": "c",
            "rules": [{"use": "large", "code": True}, {"use": "large", "hint": "legal"}],
        },
        "fallback": {"c": {"to": ["b", "fast"]}, "b": {"to": ["a"], "on": ["context_length"]}},
    }
)
check_selection(SELECTION, MODELS)
NAMES = Names(SELECTION, MODELS)
CODE = Features(code=True)


@pytest.mark.parametrize(
    ("asked", "features", "alive", "granted", "expected"),
    [
        ("a", Features(), "abc", None, (("a",), "named", "", "")),
        ("a", Features(), "", None, (("a",), "named", "", "")),
        ("fast", Features(), "abc", None, (("a",), "alias", "", "")),
        ("auto", Features(), "abc", None, (("a",), "auto", "default", "")),
        ("chat", CODE, "abc", None, (("c", "b", "a"), "auto", "code", "")),
        ("c", Features(), "ab", None, (("c", "b", "a"), "named", "", "c")),
        ("c", Features(), "a", None, (("c", "b", "a"), "named", "", "bc")),
        ("c", Features(), "", None, (("c", "b", "a"), "named", "", "")),
        ("b", Features(), "a", None, (("b", "a"), "named", "", "")),
        ("c", Features(), "abc", {"c"}, (("c",), "named", "", "")),
        ("c", Features(), "abc", {"c", "a"}, (("c", "a"), "named", "", "")),
        ("fast", Features(), "abc", {"quick"}, (("a",), "alias", "", "")),
        ("fast", Features(), "abc", {"a"}, (("a",), "alias", "", "")),
        ("auto", CODE, "abc", {"auto"}, (("c", "b", "a"), "auto", "code", "")),
        ("auto", CODE, "abc", {"c"}, (("c",), "auto", "code", "")),
        ("auto", Features(hint="large"), "abc", None, (("c", "b", "a"), "auto", "hint", "")),
    ],
)
def test_who_answers(asked: str, features: Features, alive: str, granted: set[str] | None, expected: tuple[Any, ...]) -> None:
    found = plan(NAMES, asked, features, set(alive), granted)
    assert (found.candidates, found.via, found.rule, "".join(sorted(found.dead))) == expected


@pytest.mark.parametrize(
    ("asked", "features", "granted", "error"),
    [
        ("z", Features(), None, ModelNotFound),
        ("", Features(), None, ModelNotFound),
        ("a", Features(), {"fast"}, PermissionDenied),
        ("fast", Features(), {"b"}, PermissionDenied),
        ("auto", CODE, {"a", "b"}, PermissionDenied),
        ("auto", Features(hint="medium"), None, InvalidRequest),
        ("auto", Features(hint="nonsense"), None, InvalidRequest),
    ],
)
def test_who_does_not(asked: str, features: Features, granted: set[str] | None, error: type[HeadraceError]) -> None:
    with pytest.raises(HeadraceError) as raised:
        plan(NAMES, asked, features, MODELS, granted)
    assert type(raised.value) is error


def test_auto_is_a_name_only_where_it_is_set() -> None:
    with pytest.raises(ModelNotFound):
        plan(Names(SelectionSettings(), MODELS), "auto", Features(), MODELS)


def test_token_ids_stay_with_their_model() -> None:
    assert plan(NAMES, "c", Features(), "ab", portable=False).candidates == ("c",)
    with pytest.raises(InvalidRequest, match="token ids"):
        plan(NAMES, "auto", Features(), MODELS, portable=False)


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (Unavailable("x"), "no_capacity"),
        (Overloaded("x"), "no_capacity"),
        (ModelLoading("x"), "no_worker"),
        (NoWorker("x"), "no_worker"),
        (ContextLengthExceeded("x"), "context_length"),
        (RateLimited("x"), None),
        (InsufficientQuota("x"), None),
        (BusUnavailable("x"), None),
        (StoreUnavailable("x"), None),
        (EdgeUnavailable("x"), None),
        (EdgeFull("x"), None),
        (QueueExpired("x"), None),
        (InvalidRequest("x"), None),
    ],
)
def test_what_the_next_one_is_tried_for(refusal: HeadraceError, reason: str | None) -> None:
    assert plan(NAMES, "c", Features(), MODELS).reason(refusal) == reason
    assert plan(NAMES, "b", Features(), MODELS).reason(refusal) == (reason if reason == "context_length" else None)
    assert plan(NAMES, "a", Features(), MODELS).reason(refusal) is None


@pytest.mark.parametrize(
    ("alive", "granted", "names"),
    [
        ("abc", None, "a b c fast quick chat auto"),
        ("a", None, "a c fast quick chat auto"),  # a answers for c
        ("b", None, "b c chat auto"),
        ("", None, ""),
        ("abc", {"c"}, "c chat auto"),
        ("abc", {"fast"}, "fast chat auto"),  # which may come to fast
        ("abc", set(), ""),
    ],
)
def test_what_is_listed(alive: str, granted: set[str] | None, names: str) -> None:
    listed = offered(NAMES, set(alive), granted)
    assert listed == names.split()
    for name in listed:
        must_be_offered(NAMES, name, set(alive), granted)


def test_what_is_not_offered_says_why() -> None:
    with pytest.raises(ModelNotFound):
        must_be_offered(NAMES, "b", {"a"})
    with pytest.raises(PermissionDenied):
        must_be_offered(NAMES, "b", {"b"}, {"a"})


Subset = st.sets(st.sampled_from(MODELS))
Asked = st.sampled_from([*MODELS, "fast", "quick", "chat", "auto"])


@given(Asked, st.builds(Features, code=st.booleans(), hint=st.sampled_from(["", "legal", "small"])), Subset, st.none() | Subset)
def test_nobody_answers_who_may_not(asked: str, features: Features, alive: set[str], granted: set[str] | None) -> None:
    try:
        found = plan(NAMES, asked, features, alive, granted)
    except PermissionDenied:
        return
    wanted, others = found.candidates[0], found.candidates[1:]
    fallback = SELECTION.fallback.get(wanted)
    assert len(set(found.candidates)) == len(found.candidates)
    assert granted is None or granted.issuperset(found.candidates)
    assert set(others) <= ({SELECTION.follow(name)[-1] for name in fallback.to} if fallback else set())
    assert wanted not in found.dead or any(other in alive for other in others)
    assert found.dead.isdisjoint(alive)
    if alive & set(found.candidates) and (wanted in alive or "no_worker" in found.on):
        assert asked in offered(NAMES, alive, granted)
