"""The simulated cluster does what is claimed of it; how policies compare is for `bench/routing.py` to say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

import pytest

from bench.routing import main
from bench.routing_world.cluster import Cluster
from bench.routing_world.compare import POLICIES, sweep, verdict
from bench.routing_world.job import SimJob
from bench.routing_world.measure import Result, measure
from bench.routing_world.prefill import PrefillWorker
from bench.routing_world.settings import Limits, World
from bench.routing_world.trace import Row, read

SMALL = World(prefill_workers=2, decode_workers=2)


def rows(count: int, *, every: float = 0.05, prompt: int = 2000, output: int = 20) -> list[Row]:
    names = [number.to_bytes(16, "little") for number in range(8)]
    return [Row(number * every, prompt, output, tuple(names[: prompt // 512]), number % 3) for number in range(count)]


def test_mooncake_rows(tmp_path: Path) -> None:
    path = tmp_path / "any.name"
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 1000, "input_length": 512, "output_length": 2, "hash_ids": [7]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read(path, seed=1)
    assert (first.at, first.prompt, first.output) == (0.0, 512, 2)
    assert (second.at, second.prompt, second.output) == (2.0, 1100, 5)
    assert second.blocks[:1] == first.blocks
    assert len(second.blocks) == 2, "a block that is not full cannot be shared"


def test_azure_rows(tmp_path: Path) -> None:
    path = tmp_path / "any.name"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:47.9305900,396,109\n"
        "2024-05-12 00:00:00.003163+00:00,1,1\n"
    )
    first, second, zoned = read(path, seed=1)
    assert (first.prompt, first.output, first.blocks) == (374, 44, ())
    assert second.at == pytest.approx(1.25)
    assert zoned.at > 0


def test_what_is_no_trace_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t"
    path.write_text("a,b\n1,2\n")
    assert main(["--trace", str(path)]) == 2
    assert "columns" in capsys.readouterr().err


@pytest.mark.parametrize("policy", POLICIES)
def test_every_job_ends(policy: str) -> None:
    cluster = Cluster(SMALL, Limits(), POLICIES[policy](1))
    jobs = cluster.run(rows(300), load=3.0)
    assert all(job.refused != (job.finished >= 0) for job in jobs)
    assert all(worker.running == 0 and worker.held == 0 and not worker.waiting for worker in cluster.decode)
    assert all(worker.runs == 0 for worker in cluster.prefill)
    assert cluster.assigned == cluster.coming_tokens == [0, 0]


def test_one_job_takes_the_time_it_should() -> None:
    cluster = Cluster(World(), Limits(), POLICIES["round robin"](1))
    [job] = cluster.run(rows(1, prompt=20_000, output=101), load=1.0)
    assert job.uncached == 20_000
    assert job.ttft == pytest.approx(1.0)
    assert job.finished - job.ttft == pytest.approx(100 * 0.0151)
    assert job.gap_p95 == pytest.approx(0.0151, abs=0.001)


def test_the_batch_slows_down_with_its_size() -> None:
    cluster = Cluster(World(prefill_rate=1e12, decode_workers=1), Limits(), POLICIES["round robin"](1))
    jobs = cluster.run(rows(64, every=0.0, output=101), load=1.0)
    assert [job.finished for job in jobs] == [pytest.approx(100 * (0.015 + 0.0064), abs=1e-3)] * 64


def test_a_full_batch_makes_others_wait_for_their_first_token() -> None:
    world = World(prefill_rate=1e12, decode_workers=1, batch=2)
    jobs = Cluster(world, Limits(), POLICIES["round robin"](1)).run(rows(3, every=0.0, output=11), load=1.0)
    assert sorted(job.ttft for job in jobs)[-1] == pytest.approx(10 * 0.0152, abs=1e-3)


def a_worker(world: World) -> tuple[PrefillWorker, Callable[[], list[tuple[int, float]]]]:
    """And who ends there when, from now on, by number."""
    events: list[tuple[float, int, Callable[[], None]]] = []
    ended: list[tuple[int, float]] = []
    order = count()

    def play() -> list[tuple[int, float]]:
        while events:
            when, _, call = heappop(events)
            now[0] = when
            call()
        return ended

    now = [0.0]

    def at(when: float, call: Callable[[], None]) -> None:
        heappush(events, (when, next(order), call))

    def done(job: SimJob) -> None:
        ended.append((job.number, round(now[0], 6)))

    return PrefillWorker("p", world, 100, 512, at, done, lambda _: None, None), play


def test_an_urgent_prompt_waits_for_the_step_in_progress_only() -> None:
    worker, play = a_worker(World())
    long, urgent = (SimJob(row, 0.0, n, urgent=bool(n)) for n, row in enumerate(rows(1, prompt=20_000) + rows(1, prompt=4_000)))
    worker.submit(long, 0.0)
    urgent.placed_uncached = 4_000
    worker.submit(urgent, 0.1)
    assert worker.work(0.1, urgent=True) == pytest.approx(0.06 + 0.2), "a step, and the other urgent one"
    assert play() == [(1, 0.32), (0, 1.2)]


def test_much_shorter_prompts_take_their_share_of_each_step() -> None:
    def ends(share: float) -> list[tuple[int, float]]:
        worker, play = a_worker(World(shorter_share=share))
        for number, prompt in enumerate((20_000, 2_000, 12_000, 1_000)):
            worker.submit(SimJob(Row(0.0, prompt, 1, (), 0), 0.0, number), 0.0)
        return play()

    assert ends(0.0) == [(0, 1.0), (1, 1.1), (2, 1.7), (3, 1.75)]
    # Steps of 1,200 tokens, 900 of them for the short ones, the shortest first. 12,000 is not half of what the long one has.
    assert ends(0.75) == [(3, 0.12), (1, 0.24), (0, 1.15), (2, 1.75)]


def test_a_cached_prefix_is_not_computed_again() -> None:
    cluster = Cluster(World(prefill_workers=1), Limits(), POLICIES["round robin"](1))
    first, second = cluster.run(rows(2, every=10.0, prompt=2048), load=1.0)
    assert (first.uncached, second.uncached) == (2048, 512), "the last token is always computed"


def test_ours_refuses_nothing_while_there_is_room() -> None:
    jobs = Cluster(SMALL, Limits(), POLICIES["ours"](1)).run(rows(200, every=0.2), load=1.0)
    result = measure("ours", 1.0, jobs, Limits())
    assert (result.good, result.refused) == (1.0, 0.0)


def test_the_same_seed_gives_the_same_figures() -> None:
    def once() -> object:
        return measure("ours", 1.0, Cluster(SMALL, Limits(), POLICIES["ours"](5)).run(rows(300), load=4.0), Limits())

    assert once() == once()


def a_trace(path: Path) -> str:
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": 40 * number, "input_length": 900, "output_length": 9, "hash_ids": [number % 5]})
            for number in range(60)
        )
    )
    return str(path)


def test_the_command_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_trace(tmp_path / "trace.jsonl")
    arguments = ["--trace", path, "--loads", "0.5", "1.0", "--peak", "30", "--out", str(tmp_path), "--prefill-workers", "2"]
    assert main([*arguments, "--policies", "ours", "round robin"]) == 0
    assert "against round robin" in capsys.readouterr().out
    written = json.loads((tmp_path / "routing-trace-default.json").read_text())
    assert written["world"]["prefill_workers"] == 2
    assert len(written["results"]) == 4
    assert (tmp_path / "routing-trace-default.png").stat().st_size > 0


def test_each_world_of_a_sweep_has_a_file_of_its_own(tmp_path: Path) -> None:
    path = a_trace(tmp_path / "trace.jsonl")
    arguments = ["--trace", path, "--loads", "0.5", "--peak", "30", "--out", str(tmp_path), "--policies", "ours", "--no-plots"]
    assert main([*arguments, "--sweep"]) == 0
    assert len(list(tmp_path.glob("*.json"))) == 11
    assert (tmp_path / "routing-trace-decode-KV-x0.5.json").exists()


def test_verdict() -> None:
    def result(policy: str, load: float, goodput: float) -> Result:
        found = measure(policy, load, Cluster(SMALL, Limits(), POLICIES[policy](1)).run(rows(1), 1.0), Limits())
        return replace(found, goodput=goodput)

    goodput = {("ours", 0.5): 9.9, ("round robin", 0.5): 10.0, ("ours", 1.0): 12.0, ("round robin", 1.0): 10.0}
    found = verdict([result(*key, value) for key, value in goodput.items()])
    assert (found.worst, found.worst_load, found.gain) == (pytest.approx(-0.01), 0.5, pytest.approx(0.2))


def test_the_sweep_changes_one_thing_at_a_time() -> None:
    names = [name for name, _ in sweep(World())]
    assert len(names) == len(set(names)) == 10
