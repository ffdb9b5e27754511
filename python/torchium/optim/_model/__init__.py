"""What optimizers share that look at a model's layers: `of_model`, their base; `watch`, the hooks on the layers; for
KFAC `factors`, the layers that it takes with their factors; and `choose`, which matrices of a model get AdamW.
"""
