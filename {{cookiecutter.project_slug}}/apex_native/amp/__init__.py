"""Mixed precision with Apex's calls, and functions that read amp's state; see README.md."""

from .casting import (
    bfloat16_function,
    disable_casts,
    float_function,
    half_function,
    half_type,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize
from .handle import master_pairs, scale_loss
from .state import (
    _amp_state,
    current_loss_scale,
    has_dynamic_loss_scale,
    load_state_dict,
    master_params,
    properties,
    state_dict,
)
