"""shardrules: decides how every array of a huge JAX model is sharded.

See `match_partition_rules` for the main job, and `Rules` to compile a rule list once.
"""

from shardrules._coverage import Counters, Coverage
from shardrules._dialects import EFORMER, Dialect
from shardrules._rules import Rules, match_partition_rules

__all__ = ["EFORMER", "Counters", "Coverage", "Dialect", "Rules", "match_partition_rules"]
__version__ = "0.1.0"
