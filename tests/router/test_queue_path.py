"""Jobs that wait in the queue: who is next, and how each ends."""

from __future__ import annotations

from schemas.codec import encode
from schemas.job import LANES, Job, Tier
from schemas.lifecycle import State
from schemas.placement import Accepted, Queue
from schemas.state import EdgeBeat, QueueReport, Role
from services.bus.typed import send
from services.clock import SystemClock
from services.router.lanes import QUANTUM
from tests.router.fakes import EDGE, MODEL, SUBJECTS, FakeWorker, a_job, a_process
from tests.router.harness import House, eventually
from tests.waiting import until


async def test_a_waiting_job_is_placed_when_credit_appears(house: House) -> None:
    [both] = await house.workers(Role.BOTH, slots=0, queued=1)
    job = a_job()
    assert isinstance(await house.submit(job), Queue)
    await house.put(job)
    assert not both.heard
    both.free()
    await until(lambda: both.placed)
    assert both.placed[0].job == job
    await eventually(house.empty)


async def test_a_job_told_to_queue_is_placed_by_the_next_credit_not_by_the_next_count(house_that_rarely_counts: House) -> None:
    house = house_that_rarely_counts
    [both] = await house.workers(Role.BOTH, slots=0)
    job = a_job()
    assert isinstance(await house.submit(job), Queue)
    await house.put(job)
    both.free()
    await until(lambda: both.placed)


async def test_a_job_told_to_queue_is_looked_for_until_it_is_there(house_that_rarely_counts: House) -> None:
    house = house_that_rarely_counts
    [both] = await house.workers(Role.BOTH)
    send(house.edge, SUBJECTS.queue(MODEL), QueueReport(router=a_process("router"), model=MODEL, waiting={"paid": 1}))
    job = a_job()
    assert isinstance(await house.submit(job), Queue)
    await until(lambda: house.queue.pulls >= 2, what="it looked, and looks again")
    await house.put(job)
    await until(lambda: both.placed)


async def test_without_credit_nothing_is_pulled(house: House) -> None:
    [both] = await house.workers(Role.BOTH, slots=0)
    await house.put(a_job())
    await until(lambda: house.routers[0].waiting.by_tier(MODEL) == {"paid": 1})
    said = len(house.reports)
    both.beat()
    await until(lambda: len(house.reports) >= said + 2)
    assert house.queue.pulls == 0


async def test_tiers_by_priority_lanes_by_turn(house: House) -> None:
    [both] = await house.workers(Role.BOTH, slots=0)
    heavy = [a_job(lane=1, tokens=QUANTUM + 1, salt=b"%d" % number) for number in range(2)]
    light = [a_job(lane=2, tokens=QUANTUM // 2, salt=b"light%d" % number) for number in range(3)]
    free, enterprise = a_job(tier=Tier.FREE), a_job(tier=Tier.ENTERPRISE, lane=7)
    await house.put(free, *heavy, *light, enterprise)
    await until(lambda: sum(house.routers[0].waiting.by_tier(MODEL).values()) == 7)
    both.free()
    await until(lambda: len(both.placed) == 7)
    names = {enterprise.job: "enterprise", free.job: "free"} | {j.job: "heavy" for j in heavy} | {j.job: "light" for j in light}
    placed = [names[placement.job.job] for placement in both.placed]
    assert placed == ["enterprise", "heavy", "light", "light", "heavy", "light", "free"]


async def test_a_lane_is_charged_for_what_is_computed_not_for_what_is_cached(house: House) -> None:
    [both] = await house.workers(Role.BOTH, slots=0, blocks=1000)
    tokens = 4 * QUANTUM // 5  # two of them are more than a quantum
    same = [a_job(lane=1, tokens=tokens, salt=b"same") for _ in range(3)]
    other = [a_job(lane=2, tokens=tokens, salt=b"%d" % number) for number in range(2)]
    await house.put(*same, *other)
    await until(lambda: sum(house.routers[0].waiting.by_tier(MODEL).values()) == 5)
    both.free()
    await until(lambda: len(both.placed) == 5)
    names = {job.job: "same" for job in same} | {job.job: "other" for job in other}
    assert [names[placement.job.job] for placement in both.placed][:3] == ["same", "same", "same"]


async def test_a_tier_cannot_be_chosen_by_the_subject(house: House) -> None:
    [both] = await house.workers(Role.BOTH)
    forged, honest = a_job(tier=Tier.FREE), a_job(tier=Tier.FREE)
    await house.queue.put(SUBJECTS.job(MODEL, "enterprise", 0, forged.job), encode(forged), msg_id=forged.job, ttl_s=30.0)
    await until(lambda: house.refusals.refused["jobs", "unreadable_message"] == 1)
    await house.put(honest)
    await until(lambda: both.placed)
    await eventually(house.empty)
    assert [placement.job for placement in both.placed] == [honest]


async def test_a_job_whose_first_token_would_be_too_late_is_told_to_its_edge(house: House) -> None:
    [both] = await house.workers(Role.BOTH, slots=0)
    job = a_job(tokens=100, first_token_s=0.5)
    assert isinstance(await house.submit(job), Queue)
    await house.put(job)
    both.backlog_s = 60.0
    both.free()
    await until(lambda: house.events)
    [event] = house.events
    assert (event.state, event.error_code) == (State.FAILED, "no_capacity")
    assert event.retry_after is not None
    assert 1.0 <= event.retry_after <= 120.0
    assert not both.placed


async def test_order_within_a_lane(house: House) -> None:
    [both] = await house.workers(Role.BOTH, slots=0)
    jobs = [a_job(lane=5) for _ in range(6)]
    await house.put(*jobs)
    both.free()
    await until(lambda: len(both.placed) == 6)
    assert [placement.job for placement in both.placed] == jobs


async def test_a_job_that_nobody_takes_is_back_at_once_and_first_again(house: House) -> None:
    [both] = await house.workers(Role.BOTH, refuses={"submit"})
    first, second = a_job(), a_job()
    await house.put(first, second)
    await until(lambda: both.heard.count("submit") >= 2, what="it is tried again")
    assert len(await house.queued()) == 2
    both.refuses.clear()
    await until(lambda: len(both.placed) == 2)
    assert [placement.job for placement in both.placed] == [first, second]


async def test_a_job_too_large_for_now_lets_other_lanes_pass(house: House) -> None:
    [both] = await house.workers(Role.BOTH, blocks=5)
    large, small = a_job(tokens=200, lane=0), a_job(lane=1)
    await house.put(large, small)
    await until(lambda: both.placed)
    assert [placement.job for placement in both.placed] == [small]
    both.blocks = 100
    both.beat()
    await until(lambda: len(both.placed) == 2)


async def test_a_job_that_can_never_run_is_told_to_its_edge(house: House) -> None:
    await house.workers(Role.BOTH)
    job = a_job(tokens=5_000)
    await house.put(job)
    await until(lambda: house.events)
    [event] = house.events
    assert (event.job, event.attempt, event.hop, event.run) == (job.job, 1, 0, 0)
    assert (event.state, event.error_code) == (State.FAILED, "context_length_exceeded")
    await eventually(house.empty)


async def test_an_expired_job_is_dropped_without_a_word(house: House) -> None:
    [both] = await house.workers(Role.BOTH)
    late, next_one = a_job(stamp=SystemClock().wall() - 31.0), a_job()
    await house.put(late, next_one)
    await until(lambda: both.placed)
    assert [placement.job for placement in both.placed] == [next_one]
    assert not house.events
    await eventually(house.empty)


async def test_deadlines_are_read_with_the_edges_clock(house: House) -> None:
    """The edge's clock is an hour ahead of ours: by it, one job is late and the other is not."""
    [both] = await house.workers(Role.BOTH, slots=0)
    ahead = SystemClock().wall() + 3600.0
    send(house.edge, SUBJECTS.edge_state(EDGE), EdgeBeat(process=EDGE, sent=ahead))
    late, in_time = a_job(stamp=ahead - 31.0), a_job(stamp=ahead)
    await house.put(late, in_time)
    both.free()
    await until(lambda: both.placed)
    await eventually(house.empty)
    assert [placement.job for placement in both.placed] == [in_time]


async def test_an_unreadable_job_is_dropped_and_counted(house: House) -> None:
    await house.workers(Role.BOTH)
    await house.queue.put(f"{SUBJECTS.lane(MODEL, 'paid', 0)}.x", b"junk", msg_id="x", ttl_s=30.0)
    await until(lambda: house.refusals.refused["jobs", "unreadable_message"] == 1)
    await eventually(house.empty)


async def test_the_queue_comes_back_after_it_was_down(house: House) -> None:
    [both] = await house.workers(Role.BOTH)
    house.queue.down = True
    said = len(house.reports)
    await until(lambda: len(house.reports) >= said + 3, what="it goes on reporting while it cannot count")
    house.queue.down = False
    job = a_job()
    await house.put(job)
    await until(lambda: both.placed)


async def one_stranded(house: House) -> tuple[FakeWorker, Job]:
    """A worker that would take it, and a job in a queue that gives none, as its router has found."""
    house.queue.headless = True
    [both] = await house.workers(Role.BOTH)
    stranded = a_job()
    await house.put(stranded)
    await until(lambda: house.routers[0].waiting.stuck(MODEL))
    return both, stranded


async def test_what_cannot_be_pulled_holds_no_new_work_back(house: House) -> None:
    """The stream has a leader, its consumer has none: jobs are put and counted, and no router gets them."""
    both, stranded = await one_stranded(house)
    new = a_job()
    assert isinstance(await house.submit(new), Accepted)
    assert house.routers[0].waiting.by_tier(MODEL) == {"paid": 1}, "it is reported all the same"
    house.queue.headless = False
    await until(lambda: len(both.placed) == 2)
    assert [placement.job for placement in both.placed] == [new, stranded]
    await eventually(house.empty)


async def test_a_queue_that_gives_again_is_noticed_without_credit(house: House) -> None:
    """Else those who waited would stay behind all who come."""
    both, stranded = await one_stranded(house)
    both.slots = 0
    both.beat()
    await until(lambda: not house.routers[0].view.workers(MODEL)[0].decode_slots)
    house.queue.headless = False
    await until(lambda: not house.routers[0].waiting.stuck(MODEL))
    both.slots = 1
    assert isinstance(await house.submit(a_job()), Queue), "it waits its turn again"
    both.beat()
    await until(lambda: both.placed)
    assert both.placed[0].job == stranded


async def test_two_routers_place_each_job_once(house_of_two: House) -> None:
    workers = await house_of_two.workers(Role.BOTH, Role.BOTH, slots=0)
    jobs = [a_job(lane=number % LANES) for number in range(12)]
    await house_of_two.put(*jobs)
    for worker in workers:
        worker.slots = 100
        worker.beat()
    await until(lambda: sum(len(worker.placed) for worker in workers) >= 12)
    await eventually(house_of_two.empty)
    placed = [placement.job.job for worker in workers for placement in worker.placed]
    assert sorted(placed) == sorted(job.job for job in jobs)


async def test_two_models_are_emptied_side_by_side(house: House) -> None:
    [one] = await house.workers(Role.BOTH, slots=0)
    [two] = await house.workers(Role.BOTH, model="org/other:1")
    blocked, free = a_job(), a_job(model="org/other:1")
    await house.put(blocked, free)
    await until(lambda: two.placed)
    assert not one.placed
    one.free()
    await until(lambda: one.placed)


async def test_the_drain_rate_is_reported(house: House) -> None:
    [both] = await house.workers(Role.BOTH)
    await house.put(*(a_job(lane=lane) for lane in range(4)))
    await until(lambda: len(both.placed) == 4)
    await until(lambda: any(report.drain_rate > 0 for report in house.reports))


async def test_waiting_jobs_are_reported_by_tier(house: House) -> None:
    await house.workers(Role.BOTH, slots=0)
    await house.put(a_job(), a_job(), a_job(tier=Tier.FREE))
    await until(lambda: any(report.waiting == {"paid": 2, "free": 1} for report in house.reports))


async def test_what_was_encoded_is_what_is_placed(house: House) -> None:
    [both] = await house.workers(Role.BOTH)
    job = a_job(tier=Tier.ENTERPRISE, lane=9)
    await house.put(job)
    await until(lambda: both.placed)
    assert encode(both.placed[0].job) == encode(job)
