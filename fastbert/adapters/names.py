"""Tables of parameter names: what a foreign system calls each parameter, and what it is called here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def expand(table: Mapping[str, str], layers: int = 0) -> dict[str, str]:
    """Foreign name to native name of every parameter of a table.

    A name that ends in ``.*`` stands for a weight and a bias; ``{}`` for the number of each of ``layers`` layers.
    """
    names = {}
    for foreign, native in table.items():
        for i in range(layers) if "{}" in foreign else (0,):
            for parameter in ("weight", "bias") if foreign.endswith(".*") else ("",):
                ending = -1 if parameter else None
                names[foreign.format(i)[:ending] + parameter] = native.format(i)[:ending] + parameter
    return names


def load(model: M, state_dict: Mapping[str, Tensor], names: Mapping[str, str], derived: Collection[str] = ()) -> M:
    """``model`` with the parameters of a foreign ``state_dict``, in their dtype; returns it in eval mode.

    ``derived``: names that may be there and hold nothing of their own. Raises ``ValueError`` naming the missing
    and the unexpected.
    """
    missing = sorted(names.keys() - state_dict.keys())
    unexpected = sorted(state_dict.keys() - names.keys() - set(derived))
    if missing or unexpected:
        raise ValueError(f"state_dict does not fit: missing are {missing}, unexpected are {unexpected}")
    native = {names[name]: tensor for name, tensor in state_dict.items() if name in names}
    model.to(next(iter(native.values())).dtype)
    model.load_state_dict(native)
    return model.eval()


def dump(model: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The parameters of ``model`` under their foreign names; as in ``state_dict()``, not copies."""
    state = model.state_dict()
    return {foreign: state[native] for foreign, native in names.items()}


def require_equal(config: Mapping[str, Any], name: str, accepted: Any) -> None:
    """Refuse a setting, if it is there, that this package's layers have no room for."""
    if config.get(name, accepted) != accepted:
        raise ValueError(f"{name} is {config[name]!r}; accepted is {accepted!r}")
