"""The settings of model selection: what rules match, and that whatever cannot be kept to is named by its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.settings.errors import SettingsError
from services.settings.load import load
from services.settings.selection import AutoSettings, Features, Rule, SelectionSettings
from services.settings.selection_check import check_selection

MODELS = 'models = ["a", "b", "c"]\n'
AUTO = MODELS + '[selection.auto]\nsmall = "a"\nlarge = "b"\n'


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def rules(*conditions: str) -> str:
    return AUTO + "".join(f'[[selection.auto.rules]]\nuse = "large"\n{each}\n' for each in conditions)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MODELS + 'model = "d"\n', "model: 'd' is none of `models`: a, b, c"),
        ('models = ["a", "/elsewhere/a"]\n', "models: two are called 'a'"),
        (
            MODELS + '[selection.aliases]\nx = "y"\ny = "z"\nz = "y"\n',
            r"selection.aliases.x: leads back to itself \(x → y → z → y\)",
        ),
        (MODELS + '[selection.aliases]\nx = "x"\n', "selection.aliases.x: leads back to itself"),
        (MODELS + '[selection.aliases]\nx = "d"\n', "selection.aliases.x: there is no model 'd'; there are a, b, c"),
        (MODELS + '[selection.aliases]\nx = "auto"\n', "selection.aliases.x: there is no model 'auto'"),
        (MODELS + '[selection.aliases]\na = "b"\n', "selection.aliases.a: a model's name"),
        (MODELS + '[selection.aliases]\nauto = "b"\n', "selection.aliases.auto: a model's name, auto"),
        (MODELS + '[selection.aliases]\nx = "auto"\n[selection.auto]\nsmall = "x"\n', "selection.auto.small: leads back to auto"),
        ('models = ["auto"]\n[selection.auto]\nsmall = "auto"\n', "selection.auto: a model has this name"),
        (MODELS + '[selection.auto]\nsmall = "d"\n', "selection.auto.small: there is no model 'd'"),
        (MODELS + '[selection.auto]\nlarge = "a"\n', "selection.auto.default: small has no model"),
        (AUTO + "tiny = 1\n", "unknown key selection.auto.tiny"),
        (AUTO + '[[selection.auto.rules]]\nuse = "medium"\ncode = true\n', "selection.auto.rules.0.use: medium has no model"),
        (rules("colour = 1"), "unknown key selection.auto.rules.0.colour"),
        (rules("min_turns = -1"), "selection.auto.rules.0.min_turns"),
        (rules('hint = "No Word"'), "selection.auto.rules.0.hint"),
        (rules('hint = "large"'), "selection.auto.rules.0.hint: large is a size"),
        (rules("code = true", ""), "selection.auto.rules.1: has no condition"),
        (rules("min_characters = 2\nmax_characters = 1"), "selection.auto.rules.0: can never match"),
        (rules("code = true", "tools = true", "code = true\nmin_turns = 3"), "selection.auto.rules.2: can never match"),
        (rules("code = true", "code = false", "tools = true"), "selection.auto.rules.2: can never match"),
        (rules("max_characters = 9", "min_characters = 10", 'hint = "x"'), "selection.auto.rules.2: can never match"),
        (MODELS + '[selection.fallback.d]\nto = ["a"]\n', "selection.fallback.d: there is no model 'd'"),
        (MODELS + '[selection.aliases]\nx = "a"\n[selection.fallback.x]\nto = ["b"]\n', "selection.fallback.x: it is of a model"),
        (MODELS + '[selection.fallback.a]\nto = ["d"]\n', "selection.fallback.a.to.0: there is no model 'd'"),
        (MODELS + '[selection.fallback.a]\nto = ["b", "a"]\n', "selection.fallback.a.to.1: a is tried before"),
        (MODELS + "[selection.fallback.a]\nto = []\n", "selection.fallback.a.to"),
        (MODELS + '[selection.fallback.a]\nto = ["b"]\non = ["monday"]\n', "selection.fallback.a.on.0"),
        (MODELS + "[edge.model_prices]\nd = 1.0\n", "edge.model_prices.d: there is no such model"),
        (MODELS + "[edge.model_prices]\na = -1.0\n", "edge.model_prices.a"),
    ],
)
def test_the_wrong_key_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "headrace.toml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        load()


def test_what_makes_sense_is_read(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text(
        rules('hint = "legal"', "min_characters = 10", "max_characters = 9\nmin_turns = 4", "tools = true", "code = true")
        + '[selection.aliases]\nchat = "auto"\nfast = "quick"\nquick = "a"\n'
        + '[selection.fallback.b]\nto = ["fast", "c"]\non = ["no_worker"]\n'
    )
    settings = load()
    assert (settings.model, settings.served_names) == ("a", ("a", "b", "c"))
    assert settings.selection.follow("fast") == ("fast", "quick", "a")
    assert settings.selection.fallback["b"].on == ("no_worker",)


def test_models_as_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text(MODELS)
    monkeypatch.setenv("HEADRACE_MODELS", "d, e")
    assert load().served == ("d", "e")
    monkeypatch.setenv("HEADRACE_MODELS", '["d", "/folder/of/f"]')
    assert load().served_names == ("d", "f")
    monkeypatch.setenv("HEADRACE_MODEL", "d")
    assert load().model == "d"
    for nameless in ("d, ", '["d", ""]'):
        monkeypatch.setenv("HEADRACE_MODELS", nameless)
        with pytest.raises(SettingsError, match=r"models\.1"):
            load()


def test_one_model_is_what_it_was() -> None:
    settings = load()
    assert settings.served == settings.served_names == (settings.model,)
    assert settings.selection == SelectionSettings()


Bound = st.none() | st.integers(0, 4)
YesNo = st.sampled_from([None, False, True])
Rules = st.builds(
    Rule,
    use=st.just("small"),
    min_characters=Bound,
    max_characters=Bound,
    min_turns=Bound,
    max_turns=Bound,
    code=YesNo,
    tools=YesNo,
    hint=st.sampled_from([None, "x", "y"]),
)
EVERY_REQUEST = [
    Features(characters, turns, code, tools, hint)
    for characters in range(6)
    for turns in range(6)
    for code in (False, True)
    for tools in (False, True)
    for hint in ("", "x", "y")
]


@given(st.lists(Rules, min_size=1, max_size=4))
def test_exactly_the_rules_that_no_request_can_meet_are_refused(listed: list[Rule]) -> None:
    """Against trying every request there is."""
    first = [next((at for at, rule in enumerate(listed) if rule.meets(request)), None) for request in EVERY_REQUEST]
    dead = [at for at in range(len(listed)) if at not in first]
    blank = [at for at, rule in enumerate(listed) if not rule.kinds]
    selection = SelectionSettings(auto=AutoSettings(small="a", rules=tuple(listed)))
    if dead or blank:
        with pytest.raises(ValueError, match=rf"selection.auto.rules.{min(dead + blank)}: "):
            check_selection(selection, ["a"])
    else:
        check_selection(selection, ["a"])


@given(st.dictionaries(st.sampled_from("pqrs"), st.sampled_from("apqrsz"), max_size=4))
def test_aliases_that_are_accepted_end_at_a_model(aliases: dict[str, str]) -> None:
    selection = SelectionSettings(aliases=aliases)
    ends = {alias: selection.follow(alias)[-1] for alias in aliases}  # ends, whatever they are
    try:
        check_selection(selection, ["a"])
    except ValueError as error:
        named = str(error).split(":")[0].removeprefix("selection.aliases.")
        assert ends[named] != "a"
    else:
        assert set(ends.values()) <= {"a"}


@pytest.mark.parametrize(
    ("features", "picked"),
    [
        ({}, ("small", "default")),
        ({"characters": 100}, ("large", "length")),
        ({"characters": 99}, ("small", "default")),
        ({"turns": 3}, ("medium", "depth")),
        ({"code": True}, ("large", "code")),
        ({"code": True, "characters": 5}, ("large", "code")),
        ({"tools": True}, ("medium", "tools")),
        ({"tools": True, "code": True}, ("large", "code")),
        ({"hint": "legal"}, ("large", "hint")),
        ({"hint": "legal", "tools": True}, ("medium", "tools+hint")),
        ({"hint": "small", "characters": 100}, ("small", "hint")),
        ({"hint": "medium"}, ("medium", "hint")),
    ],
)
def test_what_auto_picks(features: dict[str, Any], picked: tuple[str, str]) -> None:
    auto = AutoSettings.model_validate(
        {
            "small": "a",
            "medium": "b",
            "large": "c",
            "rules": [
                {"use": "medium", "hint": "legal", "tools": True},
                {"use": "large", "hint": "legal"},
                {"use": "large", "code": True},
                {"use": "large", "min_characters": 100},
                {"use": "medium", "min_turns": 3},
                {"use": "medium", "tools": True},
            ],
        }
    )
    check_selection(SelectionSettings(auto=auto), ["a", "b", "c"])
    assert auto.pick(Features(**features)) == picked


def test_the_example_of_the_docs_can_be_kept_to(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    example = next(block for block in page.split("```toml\n")[1:] if "[selection.auto]" in block).split("```")[0]
    (tmp_path / "headrace.toml").write_text(example)
    settings = load()
    assert settings.selection.follow("gpt-4o")[-1] == "auto"
    assert settings.edge.price("qwen2.5-7b") == 0.004
