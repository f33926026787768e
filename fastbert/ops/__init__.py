"""The ops: public functions with one contract each, served by several backends."""

from .add_dropout_layer_norm import add_dropout_layer_norm as add_dropout_layer_norm
from .attention import attention as attention
from .dropout import dropout_bits as dropout_bits
from .embedding_layer_norm import embedding_layer_norm as embedding_layer_norm
from .gelu import gelu as gelu
from .masked_lm_loss import masked_lm_loss as masked_lm_loss
from .masked_softmax import masked_softmax as masked_softmax
from .packing import Packing as Packing
from .packing import pad as pad
from .packing import unpad as unpad

# The ops that have kernels; each is a module of this package with a BACKENDS tuple.
OPS = (
    "attention",
    "masked_softmax",
    "add_dropout_layer_norm",
    "gelu",
    "embedding_layer_norm",
    "masked_lm_loss",
)
