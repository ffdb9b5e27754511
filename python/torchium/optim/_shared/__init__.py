"""Optimizers over torch.distributed: which ranks share one, where each parameter lies among them, and the collectives
that the C library asks for. Nothing here is imported before a DTensor or a process group is seen."""
