"""The connection of PyTorch optimizers with the C library: `engine`, the part of an optimizer on one device;
`placement`, the engine of each parameter; `state`, checks of checkpoints; `report`, memory, methods and statistics."""
