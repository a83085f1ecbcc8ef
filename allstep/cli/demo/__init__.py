"""`allstep demo`; each panel is measured in a file of its own, and all are shown alike."""

from allstep.cli.demo.command import run

__all__ = ["run"]
