"""The HTML report of a plan: one file that works offline.

`data` says what is in it, `page` puts that into the template beside its scripts; the scripts show
it. Costs per folded row. Must not know how a plan or a finding is made.
"""

from shardrules._planning.showing.report.page import report_html

__all__ = ["report_html"]
