"""How a process of this project ends when something is wrong: the exception for wrong input, and the exit codes. Alone in a file, so
that processes without tensors need not load torch for it."""

EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2
EXIT_DIVERGED = 65  # too many steps in a row were not finite or far off: see out/<run>/diverged.txt (EX_DATAERR)
EXIT_UNHEALTHY = 70  # a check found what must not be: the last line of the log names it (EX_SOFTWARE)
EXIT_OUT_OF_MEMORY = 71  # the device or the host refused an allocation (EX_OSERR)
EXIT_NO_SPACE = 73  # a file system is full, or a quota is used up (EX_CANTCREAT)
EXIT_NOT_SAVED = 74  # the last checkpoint could not be written, older ones are untouched (EX_IOERR)
EXIT_STOPPED = 75  # stopped on request after a checkpoint: run again to continue (EX_TEMPFAIL of sysexits.h)
EXIT_HANG = 124  # no progress, and restarts did not help or were not allowed (that of timeout(1))


class ConfigError(Exception):
    """Input that cannot work: the message names the setting, its value and the fix. Ends the program with code 2."""


class LaunchError(Exception):
    """A setting of the launcher that cannot work; the message names it, its value and the fix."""


class ShortOfNodes(LaunchError):
    """Too few nodes of an allocation can be used: another one may do."""
