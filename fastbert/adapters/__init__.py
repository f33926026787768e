"""Foreign BERTs: their checkpoints as native models and back, bit for bit.

Each module has ``from_state_dict(state_dict, config)``, where ``config`` is that system's own settings as a dict,
and ``to_state_dict(model)``; both raise ``ValueError`` naming keys or settings that do not fit. Its docstring
says in what the native model's results differ from that system's.
"""

from . import d2l as d2l
from . import graykode as graykode
from . import minbert as minbert
from . import moonhotel as moonhotel
