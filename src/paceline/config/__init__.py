"""The settings of a run: its fields, what is wrong with values for them, and how they are written.

The command line's flags, the keys of study files and docs/config.md are all derived from the fields
of `RunConfig`, with their documentation, choices and limits. All problems are reported together,
each with its field and what would do.
"""

from paceline.config.parsing import from_mapping, values_to_type, words_of
from paceline.config.run_config import Every, RunConfig, fields, type_of
from paceline.config.schema import GROUPS, Option, flag_of, option_of

__all__ = [
    "GROUPS",
    "Every",
    "Option",
    "RunConfig",
    "fields",
    "flag_of",
    "from_mapping",
    "option_of",
    "type_of",
    "values_to_type",
    "words_of",
]
