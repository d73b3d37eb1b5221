"""What a comparison with the contract found. Invariant: what was not read is never called passed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped: no wheel"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact. `wrong`: what contradicts it; `notes`: differences that this adapter does not rely on."""

    fact: str
    wrong: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    findings: tuple[Finding, ...] = ()
    found: bool = True

    @property
    def verdict(self) -> Verdict:
        if not self.found:
            return Verdict.SKIPPED
        return Verdict.FAILED if self.wrong else Verdict.PASSED

    @property
    def wrong(self) -> tuple[str, ...]:
        """One line a contradiction."""
        return tuple(f"{finding.fact}: {what}" for finding in self.findings for what in finding.wrong)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"{finding.fact}: {what}" for finding in self.findings for what in finding.notes)
