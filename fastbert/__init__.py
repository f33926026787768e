"""fastbert: kernels that make BERT-style encoders train faster under PyTorch."""

from . import adapters as adapters
from . import ops as ops
from .bert import BertConfig as BertConfig
from .bert import BertForMaskedLM as BertForMaskedLM
from .bert import BertForPreTraining as BertForPreTraining
from .bert import BertForSequenceClassification as BertForSequenceClassification
from .bert import BertLayer as BertLayer
from .bert import BertModel as BertModel
from .ops.registry import use_backend as use_backend

__version__ = "0.1.0"
