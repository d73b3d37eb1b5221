"""`headrace verify trtllm`: whether the TensorRT-LLM that is installed here is the one its adapter was written for.

Invariant: exit code 0 means that its source was read and contradicts nothing; without it the code is 3, not 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from services.cli.failure import EXIT_FAILED
from services.engine.trtllm_engine.findings import Report, Verdict
from services.engine.trtllm_engine.verifier import find, verify

EXIT_SKIPPED = 3


def run(arguments: argparse.Namespace) -> int:
    """Prints a line a fact; the exit code."""
    report = verify(Path(arguments.package) if arguments.package else find())
    for line in lines(report):
        print(line)
    return {Verdict.PASSED: 0, Verdict.FAILED: EXIT_FAILED, Verdict.SKIPPED: EXIT_SKIPPED}[report.verdict]


def lines(report: Report) -> list[str]:
    facts = [f"{'ok ' if not finding.wrong else 'BAD'} {finding.fact}" for finding in report.findings]
    wrong = [f"  wrong: {line}" for line in report.wrong]
    notes = [f"  note: {line}" for line in report.notes]
    return [*facts, *wrong, *notes, str(report.verdict)]
