"""Whether a script trains the same model on any number of workers, and if not, why."""
