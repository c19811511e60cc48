"""Read, check and write the configs of a run, without loading TensorFlow.

config = load_config("configs/quickstart.yaml", ["train.epochs=2"])
text = canonical_json(config)            # one text a config: what travels through TFX
assert config_from_json(text) == config
"""

from __future__ import annotations

if __name__ == "configs":
    raise ImportError(
        "configs: import it as 'rowstep.configs'. Got 'import configs' from inside the checkout, "
        "which would load every class twice. Install rowstep (make setup) and use the full name."
    )

from rowstep.configs.errors import ConfigError
from rowstep.configs.load import (
    canonical_json,
    config_from_json,
    export_schema,
    load_config,
    parse_config,
)
from rowstep.configs.schema import RunConfig

__all__ = [
    "ConfigError",
    "RunConfig",
    "canonical_json",
    "config_from_json",
    "export_schema",
    "load_config",
    "parse_config",
]
