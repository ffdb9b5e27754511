"""Common to optimizers that observe a model's layers: `of_model`, their base class; `watch`, the hooks on the layers;
`factors`, KFAC's layers with their factors; and `choose`, which matrices of a model get AdamW."""
