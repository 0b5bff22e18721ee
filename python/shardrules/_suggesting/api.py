"""The public names of suggesting: `shardrules.__getattr__` imports this on first use.

Must not define anything.
"""

from shardrules._suggesting.suggest import suggest as suggest
from shardrules._suggesting.suggestion import Comparison as Comparison
from shardrules._suggesting.suggestion import CutReason as CutReason
from shardrules._suggesting.suggestion import Reason as Reason
from shardrules._suggesting.suggestion import Suggestion as Suggestion
