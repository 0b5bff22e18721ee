"""Renames of families of models for `load`, `reshard` and `save`, and their inverses."""

from shardrules._checkpoint.families import HF_TO_FLAX as HF_TO_FLAX
from shardrules._checkpoint.families import Affine as Affine
from shardrules._checkpoint.families import from_hf as from_hf
from shardrules._checkpoint.inverses import inverse as inverse
from shardrules._checkpoint.renames import DEEPSEEK_STACKED as DEEPSEEK_STACKED
from shardrules._checkpoint.renames import DEEPSEEK_UNSTACKED as DEEPSEEK_UNSTACKED
