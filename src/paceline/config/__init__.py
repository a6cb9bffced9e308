"""The configuration of a run.

The flags of the command line, the keys of study files and docs/config.md are derived from the
fields of `RunConfig`, with their documentation, choices and limits. All problems are reported
together, each with its flag and the valid values.
"""

from paceline.config.conversion import Switch
from paceline.config.parsing import from_mapping, from_record, non_default_values, to_argv
from paceline.config.run_config import Every, RunConfig, Target, fields, key, type_of
from paceline.config.run_settings import Kind, RunSettings
from paceline.config.schema import GROUPS, Option, flag_of, option_of

__all__ = [
    "GROUPS",
    "Every",
    "Kind",
    "Option",
    "RunConfig",
    "RunSettings",
    "Switch",
    "Target",
    "fields",
    "flag_of",
    "from_mapping",
    "from_record",
    "key",
    "non_default_values",
    "option_of",
    "to_argv",
    "type_of",
]
