"""safetensors, which writes corpora, states and progress of training. Only making drafters needs it (extra `draft`)."""

from perilune.core.errors import ConfigError

try:
    from safetensors import safe_open as safe_open
    from safetensors.torch import load_file as load_file
    from safetensors.torch import save_file as save_file
except ImportError as e:
    raise ConfigError("making drafters needs safetensors: pip install safetensors") from e
