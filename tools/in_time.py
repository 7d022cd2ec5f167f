"Whether a test or a page may still begin: `.ci/run` sets an end, for machines that are too slow."
import os
import time

UNTIL_S = float(os.environ.get('LLMW_TESTS_UNTIL', 'inf'))  # As `time.time` counts
LEFT_OUT = 'left out: this machine is slow, and the time is over'


def is_over() -> bool:
    "Say whether nothing may begin any more."
    return time.time() > UNTIL_S
