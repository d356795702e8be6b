"""Exceptions that mean a user's mistake or a machine's refusal, each told in one line."""


class AutoflashError(Exception):
    """Something the user can mend; the command prints it after `error:` and exits with 1."""

    exit_code = 1


class WorkloadError(AutoflashError):
    """A workload file that cannot be used: file, key, reason."""


class TraceError(AutoflashError):
    """A trace of calls that cannot be used: file, line, reason."""


class UnsupportedError(AutoflashError):
    """No family serves the problem on this GPU; the text names each family's reason."""


class DeviceError(AutoflashError):
    """The GPU asked for is not there, or is not known."""


class StoreError(AutoflashError):
    """A database or a winners file that cannot be read or written."""


class ExportError(AutoflashError):
    """A module that cannot be exported: nothing to export, or nowhere to write it."""


class SearchError(AutoflashError):
    """Every candidate of every problem failed; no winner was stored."""


class BudgetError(AutoflashError):
    """The budget was spent before any problem was decided; no winner was stored."""

    exit_code = 3
