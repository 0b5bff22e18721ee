"""The public names of moving: `shardrules.__getattr__` imports this on first use.

Must not define anything.
"""

from shardrules._moving.load import load as load
from shardrules._moving.maps import DEEPSEEK_STACKED as DEEPSEEK_STACKED
from shardrules._moving.maps import DEEPSEEK_UNSTACKED as DEEPSEEK_UNSTACKED
from shardrules._moving.maps import HF_TO_FLAX as HF_TO_FLAX
from shardrules._moving.renames import Rename as Rename
from shardrules._moving.reshard import reshard as reshard
