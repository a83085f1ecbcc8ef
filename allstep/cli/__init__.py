"""The `allstep` command: one small file for each of its commands.

Whatever reads, checks or refuses what a user has given raises `UsageError`, which `main` prints.
"""
