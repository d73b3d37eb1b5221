"""What the whole stack is measured by against llama.cpp, and the table of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Turns = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Target:
    """`ratio`: ours over theirs, at least (`more` is better) or at most. None: printed only."""

    name: str
    unit: str
    ratio: float | None
    more: bool = True

    def met(self, measured: float) -> bool:
        return self.ratio is None or (measured >= self.ratio if self.more else measured <= self.ratio)

    @property
    def wanted(self) -> str:
        return "" if self.ratio is None else f"{'≥' if self.more else '≤'} {self.ratio}x"


TARGETS = (
    Target("decode, 1 stream", "tokens/s", 1.0),
    Target("decode, 8 streams", "tokens/s", 1.3),
    Target("decode, 16 streams", "tokens/s", 1.3),
    Target("time to first token, 456-token prompt", "ms", 0.8, more=False),
    Target("8 streams, 456-token prompts", "tokens/s", 1.3),
    Target("arrivals: inter-token p99", "ms", 0.12, more=False),
    Target("arrivals: their time to first token p50", "ms", 1.3, more=False),
    Target("arrivals: total tokens/s", "tokens/s", 1.0),
    Target("arrivals: generated tokens/s", "tokens/s", None),
)


def table(ours: Turns, rivals: Mapping[str, Turns]) -> str:
    """Markdown: medians, and the median of the ratios of each pair of turns. `rivals` by name, the first one the targets'."""
    lines = [
        f"| | Headrace | {''.join(f'{name} | ratio | ' for name in rivals)}target | |",
        f"|---|---|{'---|---|' * len(rivals)}---|---|",
    ]
    for target in TARGETS:
        cells, verdict = [f"{target.name}, {target.unit}", _number(_median(ours, target))], ""
        for number, theirs in enumerate(rivals.values()):
            pairs = zip(ours, theirs, strict=True)
            ratio = statistics.median(mine[target.name] / other[target.name] for mine, other in pairs)
            cells += [_number(_median(theirs, target)), f"{ratio:.2f}x"]
            if number == 0 and target.ratio is not None:
                verdict = "met" if target.met(ratio) else "**missed**"
        if not rivals:
            verdict = "rival not built"
        lines.append(f"| {' | '.join(cells)} | {target.wanted} | {verdict} |")
    return "\n".join(lines)


def _median(turns: Turns, target: Target) -> float:
    return statistics.median(turn[target.name] for turn in turns)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
