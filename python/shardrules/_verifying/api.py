"""The public names of proofs: `shardrules.__getattr__` imports this on first use.

Must not define anything.
"""

from shardrules._verifying.audit import audit as audit
from shardrules._verifying.verify import verify as verify
