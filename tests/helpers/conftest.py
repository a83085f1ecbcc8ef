"""What pytest looks for examples in, to run them."""

collect_ignore = [
    "lightning_resumed.py",  # scripts of frameworks that `make test` does not install
    "ray_restarted.py",
    "preloaded.py",  # imported by the process that others are forked from
]
