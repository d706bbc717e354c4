"""The one exception for wrong input. Alone in a file, so that processes without tensors need not load torch for it."""


class ConfigError(Exception):
    """Input that cannot work: the message names the setting, its value and the fix. Ends the program with code 2."""
