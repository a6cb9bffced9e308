"""The sentences of reports: each phrases what the analysis found.

A difference within noise is called that, and a single run is named as one.
"""
