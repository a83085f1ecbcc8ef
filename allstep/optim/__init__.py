"""Learning-rate schedules; nothing here knows of workers."""

from allstep.optim.schedules import Schedule, constant, cosine, poly, step_decay

__all__ = ["Schedule", "constant", "cosine", "poly", "step_decay"]
