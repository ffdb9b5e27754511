"""How the layers of a model are watched in its ordinary passes: the input of each, and the gradient of the loss with
respect to its output. torchium.optim's KFAC and NaturalGradient learn of a call by a forward hook, which changes
nothing; torchium.grad_sample stands in front of each layer's forward, since it runs some of them otherwise.

`layers` knows which modules of torch.nn the library has a rule for, `uses` is one call of a module and who gets what is
seen of it, and `watch` has what is between a call and its gradient.
"""
