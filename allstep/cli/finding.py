"""What the doctor has found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What is wrong, where, and what helps.

    Attributes:
        fault: its name, for programs.
        where: a host, or one host and another.
        what: was found.
        cure: what helps; empty if it does no harm to allstep.
    """

    fault: str
    where: str
    what: str
    cure: str

    def __str__(self) -> str:
        """A line of what is wrong, and one of the cure if there is one."""
        cure = f"\n    cure: {self.cure}" if self.cure else ""
        return f"{self.where}: {self.fault}: {self.what}{cure}"
