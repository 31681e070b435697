"""Mixed precision with Apex's calls: ``initialize``, ``scale_loss`` and what belongs to them.

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
...
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
"""

from ._state import _amp_state, disable_casts, load_state_dict, master_params, state_dict
from .frontend import initialize
from .handle import scale_loss

__all__ = [
    "_amp_state",
    "disable_casts",
    "initialize",
    "load_state_dict",
    "master_params",
    "scale_loss",
    "state_dict",
]
