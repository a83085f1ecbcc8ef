"""allstep scales a PyTorch training from one process to a cluster: the same model on any number of workers."""
