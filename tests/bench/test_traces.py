"""Traces as they come: what can be read is read the same, and what cannot ends in a line that says where and why."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.routing import main
from bench.routing_world.trace import Row, read

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
CSV = HEAD + "2023-11-16 18:15:46.5,374,44\n2023-11-16 18:15:48,396,109\n"
JSON = (
    '{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
    '{"timestamp": 3000, "input_length": 512, "output_length": 2, "hash_ids": [7]}\n'
)


def of(content: str | bytes, path: Path) -> list[Row]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read(path, seed=1)


def row(**changes: Any) -> str:
    fields = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1]} | changes
    return json.dumps({name: value for name, value in fields.items() if value != "none"})


@pytest.mark.parametrize(
    "same",
    [
        JSON.replace("\n", "\r\n"),
        "\ufeff" + JSON,
        "\n  \n" + JSON.replace("\n", "\n\n"),
        "".join(reversed(JSON.splitlines(keepends=True))),
        JSON.rstrip("\n"),
        JSON.replace("1000", '"1000"').replace("3000", "3000.0"),
        JSON.replace("1000", '"2024-05-12T00:00:01Z"').replace("3000", '"2024-05-12 02:00:03+02:00"'),
        JSON.replace("1000", "-500").replace("3000", "1500"),
        JSON.replace('{"', '{"session": "s", "'),
        gzip.compress(JSON.encode()),
    ],
    ids=["CRLF", "BOM", "blank", "unsorted", "open end", "numbers as text", "dates", "negative", "more fields", "gzip"],
)
def test_mooncake_as_it_comes(same: str | bytes, tmp_path: Path) -> None:
    assert of(same, tmp_path / "any.csv") == of(JSON, tmp_path / "plain")


@pytest.mark.parametrize(
    "same",
    [
        CSV.replace("\n", "\r\n"),
        "\ufeff" + CSV,
        CSV.replace("\n", "\n \n"),
        CSV.replace("48,", "48+00:00,").replace("46.5", "46.5000000"),
        CSV.replace("18:15:46.5", "13:15:46.5-05:00"),
        CSV.replace("2023-11-16 18:15:46.5", "10.5").replace("2023-11-16 18:15:48", "12"),
        CSV.replace("\n", ",more\n"),
        CSV.replace(",", ", "),
        "GeneratedTokens,TIMESTAMP,ContextTokens\n109,2023-11-16T18:15:48,396\n44,2023-11-16T18:15:46.5,374\n",
        gzip.compress(CSV.encode()),
    ],
    ids=["CRLF", "BOM", "blank", "zone", "other zone", "seconds", "more columns", "spaces", "order", "gzip"],
)
def test_azure_as_it_comes(same: str | bytes, tmp_path: Path) -> None:
    assert of(same, tmp_path / "any.jsonl") == of(CSV, tmp_path / "plain")


def test_names_of_blocks_may_be_fewer_or_more_than_the_prompt_has(tmp_path: Path) -> None:
    few, many, none = (of(row(input_length=2000, hash_ids=ids), tmp_path / "t")[0] for ids in ([1], list(range(9)), "none"))
    assert (len(few.blocks), len(many.blocks), len(none.blocks)) == (1, 3, 0)


def test_no_tokens_count_as_one(tmp_path: Path) -> None:
    [found] = of(row(input_length=0, output_length=0), tmp_path / "t")
    assert (found.prompt, found.output, found.blocks) == (1, 1, ())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no rows"),
        (HEAD, "has no rows"),
        ("a,b\n1,2\n", "the columns TIMESTAMP, ContextTokens, GeneratedTokens"),
        (CSV.replace("GeneratedTokens", "Tokens"), "the column GeneratedTokens is missing"),
        ("[" + row() + "]", "neither JSON lines nor a CSV"),
        (JSON.encode("utf-16"), "is no text in UTF-8"),
        (gzip.compress(JSON.encode())[:40], "is compressed and damaged"),
        (JSON + "{oops\n", "line 3: is no JSON object"),
        (JSON + "[1]\n", "line 3: is no JSON object"),
        (JSON + "\n" + row(input_length="none"), "line 4: input_length is missing"),
        (JSON + row(output_length=-1), "line 3: output_length: -1 is no count of tokens"),
        (JSON + row(input_length=2.5), "line 3: input_length: 2.5 is no count of tokens"),
        (JSON + row(input_length=10**30), "is no count of tokens"),
        (JSON + row(input_length=True), "line 3: input_length: True is no count of tokens"),
        (JSON + row(timestamp=float("nan")), "line 3: timestamp: nan is no time"),
        (JSON + row(timestamp="soon"), "line 3: timestamp: 'soon' is no time"),
        (JSON + row(hash_ids="abc"), "line 3: hash_ids: 'abc' is no list"),
        (JSON + row(hash_ids=["a"]), "line 3: hash_ids: 'a' is no name of a block"),
        (JSON + row(hash_ids=[2**200]), "is no name of a block"),
        (CSV + "2023-11-16 18:16:00\n", "line 4: ContextTokens is missing"),
        (CSV + "2023-11-16 18:16:00,5,\n", "line 4: GeneratedTokens is missing"),
        (CSV + "yesterday,5,5\n", "line 4: TIMESTAMP: 'yesterday' is no time"),
        (CSV + "2023-11-16 18:16:00,many,5\n", "line 4: ContextTokens: 'many' is no count of tokens"),
        (CSV + "2023-11-16 18:16:00," + 200_000 * "9" + ",5\n", "line 4: field larger than"),
    ],
)
def test_what_cannot_be_read_ends_in_a_line(
    content: str | bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["--trace", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{path}: ")
    assert says in line


def test_a_file_that_is_not_there_and_a_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_text(JSON)
    assert main(["--trace", str(tmp_path / "no")]) == 2
    assert main(["--trace", str(tmp_path / "t"), "--out", str(tmp_path / "t")]) == 2
    missing, occupied = capsys.readouterr().err.splitlines()
    assert missing == f"{tmp_path / 'no'}: No such file or directory"
    assert occupied == f"{tmp_path / 't'}: File exists"


SMALL = (
    "--prefill-workers",
    "2",
    "--decode-workers",
    "2",
    "--loads",
    "0.5",
    "1.0",
    "--policies",
    "ours",
    "round robin",
    "dynamo",
)


@pytest.mark.parametrize(
    "rows",
    [
        [row()],
        [row(timestamp=100 * number) for number in range(5)],
        [row(hash_ids=[number]) for number in range(50)],
        [row(timestamp=1000 * number + (number > 9) * 10**15 // 2) for number in range(20)],
        [row(timestamp=number, input_length=700_000) for number in range(5)],
        [row(timestamp=number, input_length=599_900, output_length=99) for number in range(5)],
        [row(timestamp=number, hash_ids=[number % 2] * 3, input_length=2000) for number in range(50)],
    ],
    ids=["one", "five", "at once", "a quiet age", "too large for anybody", "as large as a pool", "a name twice"],
)
def test_every_trace_gets_its_report(rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    path.write_text("\n".join(rows))
    assert main(["--trace", str(path), "--out", str(tmp_path), *SMALL]) == 0
    said = capsys.readouterr().out
    assert "round robin's goodput has no peak" in said
    assert "ours against the best: +0.0%" in said
    results = json.loads((tmp_path / "routing-trace-default.json").read_text())["results"]
    assert len({result["refused"] for result in results}) == 1, "what nobody can hold is everybody's refusal"
    assert (tmp_path / "routing-trace-default.png").stat().st_size > 0


def test_overload_of_a_few_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    path.write_text("\n".join(row(timestamp=100 * number) for number in range(5)))
    assert main(["--trace", str(path), "--out", str(tmp_path), "--overload", "--check"]) == 0
    assert "MISSED" not in capsys.readouterr().out
