"""Dialects: how each library writes paths and names, and matches rules."""

from shardrules._rules.dialects import BIG_VISION as BIG_VISION
from shardrules._rules.dialects import EASYLM as EASYLM
from shardrules._rules.dialects import EFORMER as EFORMER
from shardrules._rules.dialects import FLAX_CORE as FLAX_CORE
from shardrules._rules.dialects import HALIAX as HALIAX
from shardrules._rules.dialects import KERAS as KERAS
from shardrules._rules.dialects import KEYSTR as KEYSTR
from shardrules._rules.dialects import LINEN as LINEN
from shardrules._rules.dialects import MAXTEXT as MAXTEXT
from shardrules._rules.dialects import NNX as NNX
from shardrules._rules.dialects import SPECTRAX as SPECTRAX
from shardrules._rules.dialects import Dialect as Dialect
from shardrules._rules.dialects import LogicalDialect as LogicalDialect
