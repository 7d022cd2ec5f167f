"""A gradient is not a number, and the log says so between a loss of 0 and the next learning
rate."""
import contextlib
import io

from trained_on_after_nan import mended, train


def broken():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed): train()
    return printed.getvalue()
