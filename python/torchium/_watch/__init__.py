"""How the layers of a model are watched in its ordinary passes: by torchium.optim's KFAC and NaturalGradient, and by
torchium.grad_sample. `layers` knows which modules of torch.nn the library has a rule for.
"""
