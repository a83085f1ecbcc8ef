"""What pytest looks for examples in, to run them."""

# Scripts of frameworks that `make test` does not install.
collect_ignore = ["lightning_resumed.py", "ray_restarted.py"]
