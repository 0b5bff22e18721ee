"""Rename lists for `load` and `reshard`."""

from shardrules._checkpoint.renames import DEEPSEEK_STACKED as DEEPSEEK_STACKED
from shardrules._checkpoint.renames import DEEPSEEK_UNSTACKED as DEEPSEEK_UNSTACKED
from shardrules._checkpoint.renames import HF_TO_FLAX as HF_TO_FLAX
