"""Packages that only some processes need, and the extra of pdserve that installs each."""

from pdserve.errors import ConfigError

EXTRAS = {  # by the name that is imported
    "torch": "worker",
    "triton": "worker",
    "safetensors": "worker",
    "gguf": "worker",
    "nixl_cu12": "worker",
    "ray": "ray",
    "lightkube": "kubernetes",
    "matplotlib": "plots",
}


def not_installed(module: str) -> ConfigError:
    """Return the error for a process that lacks one of these packages: it names the extra to install."""
    return ConfigError(f"{module} is not installed, and this needs it: pip install 'pdserve[{EXTRAS[module]}]'")
