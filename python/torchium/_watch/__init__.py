"""Observes the layers of a model: the input of each, and the gradient of the loss with respect to its output. KFAC and
NaturalGradient use forward hooks; torchium.grad_sample replaces each layer's forward, since it runs some layers
differently.

`layers` has the rules for modules of torch.nn, `uses` one call of a module and the interface of observers, and `watch`
connects a call with its gradient.
"""
