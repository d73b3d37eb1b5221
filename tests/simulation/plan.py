"""What a seed decides: the cluster, its clients, what goes wrong and when. A pure function of the seed.

Times are seconds from the start. Work and faults come close together, so that they meet; steps are slow, so that much is in
flight while little has to be simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import msgspec

from schemas.job import Sampling, Tier
from tests.simulation.network import Weather
from tests.simulation.reference import VOCAB

STEP_TOKENS = 64
FIRST_S = 1.5
"""When the first client comes: every process has started."""


@dataclass(frozen=True, slots=True)
class Client:
    """One request. `gives_up_s`: the client leaves so long after its start; `gives_up_at`: when it has so many tokens.

    `stops`: (choice, tokens): it has enough of a choice then, as of one that met a stop string.
    """

    at: float
    edge: int
    prompt: tuple[int, ...]
    sampling: Sampling
    tier: Tier
    lane: int
    queue_s: float
    first_token_s: float
    total_s: float
    gives_up_s: float | None
    gives_up_at: int | None
    n: int = 1
    stops: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` names a method of `Cluster`; `victim` a process by name, "" for the whole."""

    at: float
    kind: str
    victim: str = ""
    lasts: float = 0.0
    flag: bool = False
    """kill: proven by the supervisor; partition: TCP holds what was sent."""


@dataclass(frozen=True, slots=True)
class Engine:
    blocks: int
    max_batch: int
    prefill_token_s: float
    decode_step_s: float
    block_s: float
    """What the transfer of one block takes, beside the way there and back."""

    @property
    def longest_step_s(self) -> float:
        return max(STEP_TOKENS * self.prefill_token_s, self.decode_step_s) + 0.02


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    edges: int
    routers: int
    prefill: int
    decode: int
    both: int
    engine: Engine
    clients: tuple[Client, ...]
    faults: tuple[Fault, ...]
    storms: tuple[tuple[float, float, Weather], ...]
    """(from, to, weather)."""
    wall_offsets: tuple[float, ...]
    wall_drifts: tuple[float, ...]
    advice: bool = True
    """Routers hear from the server whose connection ended."""
    old_builds: frozenset[str] = frozenset()
    """Processes whose first start is of the build before, which speaks the schema version before; the next is of this one."""
    forgetful: float | None = None
    """How often the database's answer is lost; None: there is no database."""

    @property
    def names(self) -> list[str]:
        counts = (("e", self.edges), ("r", self.routers), ("p", self.prefill), ("d", self.decode), ("b", self.both))
        return [f"{letter}{number}" for letter, count in counts for number in range(1, count + 1)]


def plan(seed: int, kinds: tuple[str, ...] = ()) -> Plan:
    """`kinds` limits the faults, storms, several choices, the server's advice and old builds; () = all."""
    random = Random(f"headrace {seed}")
    edges, routers = _few(random), _few(random)
    prefill, decode, both = _few(random), _few(random), int(random.random() < 0.25)
    engine = Engine(
        blocks=random.choice((40, 64)),
        max_batch=random.choice((2, 4, 8)),
        prefill_token_s=random.choice((0.001, 0.005)),
        decode_step_s=random.choice((0.02, 0.05, 0.1)),
        block_s=random.choice((0.0, 0.0, 0.01, 0.1)),
    )
    names = Plan(seed, edges, routers, prefill, decode, both, engine, (), (), (), (), ()).names
    clients = tuple(_client(random, edges) for _ in range(random.randint(8, 24)))
    return Plan(
        seed,
        edges,
        routers,
        prefill,
        decode,
        both,
        engine,
        clients=_with_choices(clients, Random(f"choices {seed}")) if not kinds or "choices" in kinds else clients,
        faults=tuple(sorted(_faults(random, names, kinds or tuple(_FAULTS)), key=lambda fault: fault.at)),
        storms=tuple(_storms(random)) if not kinds or "storm" in kinds else (),
        wall_offsets=tuple(random.choice((0.0, random.uniform(-2.0, 2.0))) for _ in names),
        wall_drifts=tuple(random.choice((0.0, random.uniform(-1e-4, 1e-4))) for _ in names),
        advice=not kinds or "advice" in kinds,
        old_builds=_old_builds(names, Random(f"builds {seed}")) if not kinds or "builds" in kinds else frozenset(),
    )


def _few(random: Random) -> int:
    return random.choice((1, 1, 2, 2, 3))


def _client(random: Random, edges: int) -> Client:
    length = random.choice((random.randint(1, 12), random.randint(1, 60)))
    stops = tuple(random.sample(VOCAB, 6)) if random.random() < 0.2 else ()
    gives_up = random.random()
    return Client(
        at=FIRST_S + random.uniform(0.0, random.choice((0.5, 4.0))),
        edge=random.randrange(edges),
        prompt=tuple(random.choice(VOCAB) for _ in range(length)),
        sampling=Sampling(seed=random.getrandbits(64), max_tokens=random.choice((1, 4, 20, 80)), stop_token_ids=stops),
        tier=random.choice(list(Tier)),
        lane=random.randrange(16),
        queue_s=random.choice((1.5, 8.0)),
        first_token_s=random.choice((3.0, 15.0)),
        total_s=random.choice((4.0, 20.0, 30.0)),
        gives_up_s=random.choice((0.0, random.uniform(0.0, 0.05), random.uniform(0.0, 2.0))) if gives_up < 0.25 else None,
        gives_up_at=random.randint(1, 10) if gives_up > 0.9 else None,
    )


def _old_builds(names: list[str], random: Random) -> frozenset[str]:
    share = random.choice((0.0, 0.0, 0.3, 0.7))
    return frozenset(name for name in names if random.random() < share)


def _with_choices(clients: tuple[Client, ...], random: Random) -> tuple[Client, ...]:
    """Some of them ask for several choices, which the smallest pool can just hold; some have enough of one before its end."""
    return tuple(_with_choice(client, random) for client in clients)


def _with_choice(client: Client, random: Random) -> Client:
    n = random.choice((1, 1, 1, 2, 3))
    stops = tuple((choice, random.randint(1, 12)) for choice in range(n) if random.random() < 0.15)
    sampling = client.sampling
    if n > 1:
        sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, 20))
    return replace(client, n=n, stops=stops, sampling=sampling)


def _storms(random: Random) -> list[tuple[float, float, Weather]]:
    storms = []
    begins = FIRST_S
    for _ in range(random.choice((0, 1, 1, 2))):
        begins += random.uniform(0.0, 2.0)
        ends = begins + random.uniform(0.2, 3.0)
        weather = Weather(
            loss=random.choice((0.0, 0.02, 0.1, 0.3)),
            double=random.choice((0.0, 0.05, 0.2)),
            disorder=random.choice((0.0, 0.0, 0.05)),
            spike=random.choice((0.0, 0.03, 0.1)),
            spike_s=random.choice((0.05, 0.4)),
        )
        storms.append((begins, ends, weather))
        begins = ends
    return storms


def _faults(random: Random, names: list[str], kinds: tuple[str, ...]) -> list[Fault]:
    known = [kind for kind in _FAULTS if kind in kinds]
    if not known:
        return []
    return [_FAULTS[random.choice(known)](random, names) for _ in range(random.choice((0, 1, 2, 3, 5, 8)))]


def _when(random: Random) -> float:
    return FIRST_S + random.uniform(0.0, 6.0)


def _kill(random: Random, names: list[str]) -> Fault:
    """`lasts`: until it is started again under its name, 0 = never."""
    return Fault(
        _when(random), "kill", random.choice(names), lasts=random.choice((0.0, 0.2, 1.0, 4.0)), flag=random.random() < 0.7
    )


def _pause(random: Random, names: list[str]) -> Fault:
    return Fault(_when(random), "pause", random.choice(names), lasts=random.choice((0.2, 1.0, 4.0, 10.0)))


def _partition(random: Random, names: list[str]) -> Fault:
    lasts = random.choice((0.1, 0.5, 2.0, 4.0, 12.0, 20.0))
    return Fault(_when(random), "partition", random.choice(names), lasts=lasts, flag=random.random() < 0.5)


def _disconnect(random: Random, names: list[str]) -> Fault:
    return Fault(_when(random), "disconnect", random.choice(names), lasts=random.choice((0.05, 0.5, 2.0, 5.0, 12.0)))


def _nats_down(random: Random, names: list[str]) -> Fault:
    return Fault(_when(random), "nats_down", lasts=random.choice((0.1, 1.0, 4.0, 12.0)))


def _queue_down(random: Random, names: list[str]) -> Fault:
    return Fault(_when(random), "queue_down", lasts=random.choice((0.5, 3.0, 10.0)))


def _break_transfers(random: Random, names: list[str]) -> Fault:
    return Fault(_when(random), "break_transfers")


def _drain(random: Random, names: list[str]) -> Fault:
    name = random.choice(names)
    return Fault(_when(random), "drain", name, lasts=random.choice((0.0, 0.5)))


def _stall(random: Random, names: list[str]) -> Fault:
    """Of an engine; of a process without one nothing happens."""
    return Fault(_when(random), "stall", random.choice(names), lasts=random.choice((1.0, 3.0, 6.0)))


_FAULTS: dict[str, Callable[[Random, list[str]], Fault]] = {
    "kill": _kill,
    "pause": _pause,
    "partition": _partition,
    "disconnect": _disconnect,
    "nats_down": _nats_down,
    "queue_down": _queue_down,
    "break_transfers": _break_transfers,
    "drain": _drain,
    "stall": _stall,
}
