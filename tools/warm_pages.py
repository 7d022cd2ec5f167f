"""Run `nbdev_test` in processes that have imported the libraries, for `make test`.

The garbage collector never goes through what these have brought: with a third of a second for each
search, it took one processor second in forty. Options are those of `nbdev_test`.
"""
import gc

gc.disable()

import nbdev.test  # noqa: E402
from libraries import bring_libraries  # noqa: E402
from page_in_time import test_in_time  # noqa: E402

bring_libraries()

if __name__ == '__main__':
    gc.freeze()
    # A launch hides all objects and shows them again; with neither, a page that has ended is freed
    gc.freeze = gc.unfreeze = lambda: None
    gc.enable()
    nbdev.test.test_nb = test_in_time
    nbdev.test.nbdev_test()
