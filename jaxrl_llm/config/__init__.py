"""The configuration, and what the packages above share.

Of a configuration: its settings (schema), their tree (tree), entries with a form of their own (entries), contradictions
(checks), presets (corrections), settings without effect (unread), names (resolve), the command line (flags) and the
imports before it (starting). Rewards, environments and data import nothing of each other, so that what they share
stands here too: threads (background), HTTP (http_client), files that are whole or not there (files), calls of users'
functions (user_code), texts without secrets (secrets), the version.
"""

from jaxrl_llm.config.checks.values import batch_rows as batch_rows
from jaxrl_llm.config.checks.values import rows_together as rows_together
from jaxrl_llm.config.corrections import with_correction as with_correction
from jaxrl_llm.config.entries import eval_set as eval_set
from jaxrl_llm.config.resolve import ConfigError as ConfigError
from jaxrl_llm.config.schema import ConfigDict as ConfigDict
from jaxrl_llm.config.tree import assign as assign
from jaxrl_llm.config.tree import check_form as check_form
from jaxrl_llm.config.tree import check_keys as check_keys
from jaxrl_llm.config.tree import default as default
from jaxrl_llm.config.tree import flat as flat
from jaxrl_llm.config.tree import from_json as from_json
from jaxrl_llm.config.tree import own_settings as own_settings
from jaxrl_llm.config.tree import reference as reference
from jaxrl_llm.config.tree import to_json as to_json
from jaxrl_llm.config.tree import validate as validate
