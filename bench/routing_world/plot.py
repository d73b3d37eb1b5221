"""Results as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.routing_world.measure import Result

PANELS = (
    ("goodput", "goodput, requests/s"),
    ("ttft_p50", "TTFT p50, s"),
    ("ttft_p99", "TTFT p99, s"),
    ("itl_p99", "token gap p95 of a request, its p99, s"),
    ("hit_rate", "share of prompt tokens cached"),
    ("refused", "share refused"),
    ("fairness", "fairness (Jain, tenants)"),
)


def plot(results: Sequence[Result], path: Path, title: str) -> None:
    """One panel a measure, one line a policy, over the load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(20, 9))
    policies = list(dict.fromkeys(result.policy for result in results))
    for axis, (name, label) in zip(axes.flat, PANELS, strict=False):
        for policy in policies:
            line = sorted((result.load, getattr(result, name)) for result in results if result.policy == policy)
            width = 2.5 if policy == "ours" else 1.2
            axis.plot([load for load, _ in line], [value for _, value in line], marker="o", lw=width, label=policy)
        axis.set_xlabel("load (1 = round robin's peak)")
        axis.set_ylabel(label)
        if name.startswith("ttft") and any(getattr(result, name) > 0 for result in results):
            axis.set_yscale("log")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    axes.flat[-1].legend(handles, labels, loc="center")
    axes.flat[-1].axis("off")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
