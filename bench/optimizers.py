"""A thin ctypes wrapper of libtorchium's optimizers, for benchmarks and for tests vs PyTorch."""

import ctypes

from library import _Tensor, fields, tensor

KINDS = {"sgd": 0, "adamw": 1, "shampoo": 2, "soap": 3, "muon": 4, "lion": 5, "normuon": 6, "kl_shampoo": 7}
GRAFTING = {None: 0, "sgd": 1, "adagrad": 2, "rmsprop": 3, "adam": 4}
NONFINITE = {"skip": 0, "raise": 1, "ignore": 2}
STATE_DTYPE = {"float32": 0, "bfloat16": 1, "int8": 2}

_int = ctypes.c_int32


def _struct(*groups):
    return type("_Options", (ctypes.Structure,), {"_fields_": fields(*groups)})


# The option structs in tch_optim_config, except AdamW's.
_STRUCTS = {
    "shampoo": _struct(
        "long max_preconditioner_dim",
        "int merge_dims precondition_1d precondition_frequency",
        "real refresh_drift",
        "int stagger start_preconditioning_step exponent_override grafting",
        "real grafting_beta2 grafting_eps",
    ),
    "soap": _struct("int block", "real shampoo_beta", "int normalize_grads orthogonalize"),
    "muon": _struct("int method", "real ns_coefficients[3]", "int ns_steps adjust_lr_fn ns_dtype"),
    "memory": _struct(
        "int state_dtype packed_factors root_dtype master_weights stochastic_rounding", "unsigned seed", "long budget"
    ),
    "numerics": _struct("int precision", "real damping tolerance", "int method nonfinite world_invariant"),
}


class Config(ctypes.Structure):
    """tch_optim_config, field by field."""

    _fields_ = [
        *fields(
            "size struct_size",
            "int kind",
            "real lr weight_decay",
            "int weight_decay_type maximize",
            "real beta1 beta2 eps momentum dampening",
            "int nesterov use_bias_correction amsgrad constant_norm",
        ),
        ("adamw", _struct("real lr base_lr beta1 beta2 eps weight_decay")),
        *_STRUCTS.items(),
    ]


class _Parameter(ctypes.Structure):
    _fields_ = [
        ("tensor", ctypes.POINTER(_Tensor)),
        ("name", ctypes.c_char_p),
        ("use_adamw", _int),
        ("batch_dims", _int),
        ("cut_count", _int),
        ("cuts", ctypes.POINTER(ctypes.c_int64)),
    ]


class _Memory(ctypes.Structure):
    _fields_ = fields("size struct_size", "long state scratch refresh blocks factors recorded")


class _Stats(ctypes.Structure):
    _fields_ = fields(
        *("size struct_size", "long steps skipped refreshes failed", "real worst_residual", "long refreshed_factors"),
        "real interval_mean interval_max staleness_mean staleness_max",
    )


def _figures(struct):
    return {name: getattr(struct, name) for name, _ in struct._fields_[1:]}


def defaults(library, kind, **options):
    """The defaults of a kind with some options changed, those in structs by name alone; unknown names raise."""
    library.lib.tch_optim_defaults.restype = Config
    config = library.lib.tch_optim_defaults(_int(KINDS[kind]))
    if kind == "shampoo":  # the paper's, as in all published figures
        options = {"lr": 0.03, "beta2": 1.0, "eps": 1e-4, "grafting": 0, "exponent_override": 0} | options
    for name, value in options.items():
        structs = [config, *(getattr(config, struct) for struct in _STRUCTS)]
        owner = next((struct for struct in structs if name in dict(struct._fields_)), None)
        if owner is None:
            raise TypeError(f"tch_optim_config has no {name}")
        setattr(owner, name, value)
    return config


class Optimizer:
    """One group of parameters, NumPy arrays or torch tensors. Gradients are described once, when `gradients` is set."""

    def __init__(self, library, config, parameters, names=None):
        self.library = library
        self.config = config
        self._tensors = [tensor(p) for p in parameters]
        names = names or [f"p{i}" for i in range(len(parameters))]
        entries = [
            _Parameter(ctypes.pointer(t), name.encode(), 0) for t, name in zip(self._tensors, names, strict=True)
        ]
        self._parameters = (_Parameter * len(entries))(*entries)
        self._count = _int(len(entries))
        self.handle = ctypes.c_void_p()
        library._check(
            library.lib.tch_optimizer_create(
                library.context, ctypes.byref(config), None, self._count, self._parameters, ctypes.byref(self.handle)
            )
        )

    def set_gradients(self, gradients):
        """None is a missing gradient."""
        self._gradients = [None if g is None else tensor(g) for g in gradients]
        pointers = [None if g is None else ctypes.pointer(g) for g in self._gradients]
        self._list = (ctypes.POINTER(_Tensor) * len(pointers))(*pointers)

    def step(self):
        status = self.library.lib.tch_optimizer_step(self.handle, self._count, self._list)
        if status != 0:
            self.library._check(status)

    def memory(self):
        figures = _Memory(ctypes.sizeof(_Memory))
        self.library._check(self.library.lib.tch_optimizer_get_memory(self.handle, ctypes.byref(figures)))
        return _figures(figures)

    def stats(self):
        figures = _Stats(ctypes.sizeof(_Stats))
        self.library._check(self.library.lib.tch_optimizer_get_stats(self.handle, ctypes.byref(figures)))
        return _figures(figures)

    def close(self):
        self.library.lib.tch_optimizer_destroy(self.handle)
        self.handle = ctypes.c_void_p()
