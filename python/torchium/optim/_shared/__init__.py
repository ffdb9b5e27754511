"""Optimizers over torch.distributed: which ranks share one, the placement of each parameter, and the collectives of the
C library. Imported only for DTensors or a process group."""
