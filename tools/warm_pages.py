"""Run `nbdev_test` in processes that have imported the libraries, for `make test`.

The garbage collector never goes through what these have brought: with a third of a second for each
search, it took one processor second in forty. Options are those of `nbdev_test`.
"""
import gc
import os
import time

gc.disable()

import nbdev.test  # noqa: E402
from libraries import bring_libraries  # noqa: E402

bring_libraries()
UNTIL_S = float(os.environ.get('LLMW_TESTS_UNTIL', 'inf'))  # As `time.time` counts
test_page = nbdev.test.test_nb


def test_in_time(page, **options):
    "Test one page, but begin none after the end that `.ci/run` sets."
    if time.time() <= UNTIL_S: return test_page(page, **options)
    print(f'{page.name} is left out: this machine is slow, and the time is over', flush=True)
    return True, 0


if __name__ == '__main__':
    gc.freeze()
    # A launch hides all objects and shows them again; with neither, a page that has ended is freed
    gc.freeze = gc.unfreeze = lambda: None
    gc.enable()
    nbdev.test.test_nb = test_in_time
    nbdev.test.nbdev_test()
