"""Faults of hosts, links, disks and clocks, by a seed, for elastic trainings on real processes.

Workers run on two hosts, which are namespaces of this machine: the first ones beside the launcher,
those that join on the other. A seed says how many there are, and what happens to which of them at
which step. What they do between two steps is up to the machine: a seed's run is not the same each
time, only its faults are.
"""
