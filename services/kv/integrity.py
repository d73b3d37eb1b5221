"""Is a ledger of blocks consistent? A pure function of its books: it checks the pool without being the pool."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def find_problems(
    *,
    free: Sequence[int],
    cached: Collection[int],
    indexed: Collection[int],
    refs: Sequence[int],
    held: Iterable[Collection[int]],
) -> list[str]:
    """What is wrong, one sentence each; [] when free + cached + held = total and no block is in two states.

    `refs`: reference count of each block; `held`: the blocks of each holder; `indexed`: blocks the prefix cache knows.
    """
    counted = [0] * len(refs)
    for blocks in held:
        for block in blocks:
            counted[block] += 1
    in_use = {block for block, count in enumerate(counted) if count}
    idle, kept, known = set(free), set(cached), set(indexed)
    problems = [
        f"block {block} counts {refs[block]} references and has {count} holders"
        for block, count in enumerate(counted)
        if count != refs[block]
    ]
    wrong = {
        "free and held": idle & in_use,
        "free and cached": idle & kept,
        "cached and held": kept & in_use,
        "cached, unknown to the prefix cache": kept - known,
        "free, known to the prefix cache": idle & known,
        "neither free, cached nor held": set(range(len(refs))) - idle - kept - in_use,
    }
    problems += [f"{what}: {sorted(blocks)}" for what, blocks in wrong.items() if blocks]
    if len(free) != len(idle):
        problems.append(f"{len(free) - len(idle)} blocks are free twice")
    if len(free) + len(kept) + len(in_use) != len(refs):
        problems.append(f"free {len(free)} + cached {len(kept)} + held {len(in_use)} is not {len(refs)}")
    return problems
