"""The ops: public functions with one contract each, served by several backends."""

from .dropout import dropout_bits as dropout_bits
from .gelu import gelu as gelu
from .packing import Packing as Packing
from .packing import pad as pad
from .packing import unpad as unpad
