"""What a machine can do, measured."""
