"""The configuration: settings (schema), tree, contradictions (checks), command line (flags) and names (resolve)."""

from jaxrl_llm.config.checks import batch_rows as batch_rows
from jaxrl_llm.config.checks import eval_set as eval_set
from jaxrl_llm.config.checks import rows_together as rows_together
from jaxrl_llm.config.corrections import with_correction as with_correction
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
