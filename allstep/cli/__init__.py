"""The `allstep` command: one small file for each of its commands."""
