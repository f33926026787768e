"""fastbert: kernels that make BERT-style encoders train faster under PyTorch."""

from . import ops as ops
from .ops.registry import use_backend as use_backend

__version__ = "0.1.0"
