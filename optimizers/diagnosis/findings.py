"""What the doctor hands out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "report"]


@dataclass(frozen=True)
class Finding:
    """Name one thing that makes a training dense or wrong.

    str() gives "<where>: <what must hold>. Got <what is>. <what to do>."
    """

    code: str
    """What kind of thing, for programs: "embedding", "duplicates", or an argument's name ..."""
    severity: Literal["dense", "wrong"]
    """dense: a step costs O(V), all rows, instead of O(R), the rows of the batch.
    wrong: the numbers are not those of the algorithm, or there is no step at all."""
    where: str
    """A variable's path, an optimizer's class, or an argument of it."""
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem} {self.remedy}"


def report(findings: Sequence[Finding]) -> str:
    """Return findings as text, one a paragraph, or one line if there are none."""
    if not findings:
        return "Nothing found: steps cost O(R), the rows of the batch."
    count = "1 finding" if len(findings) == 1 else f"{len(findings)} findings"
    return "\n\n".join([f"{count}.", *(f"[{f.severity}] {f}" for f in findings)])
