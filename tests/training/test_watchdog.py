"""Guards: one rank alone is enough to stop all, and a watch that was paused counts again."""
import math
import time

import pytest
from trouble import wait_for

from llm_workbook.training.watchdog import HangWatch, Votes, check_finite
from llm_workbook.parallel.ranks import RankError, run_ranks


def only_rank_1():
    "The loss is no number on rank 1, and every value of rank 0 is well."
    votes = Votes(timeout_s=5)
    check_finite(votes, 2, [votes.rank, 7], loss=[2.4, math.nan][votes.rank], grad_norm=1.0)


def both_say_it():
    try: only_rank_1()
    except FloatingPointError as error: return str(error)


def test_a_value_of_one_rank_that_is_no_number_stops_all_of_them():
    words = 'loss nan at step 2: nothing is saved, and no weight was updated (rank 1, rows 1, 7)'
    assert run_ranks(both_say_it, 2, timeout_s=10) == [words] * 2
    with pytest.raises(RankError, match='FloatingPointError: loss nan at step 2'):
        run_ranks(only_rank_1, 2, timeout_s=10)


def test_a_watch_counts_nothing_in_a_pause_and_everything_after_it(tmp_path):
    hangs = []
    with HangWatch(tmp_path, 0.2, act=hangs.append) as watch:
        with watch.paused(): time.sleep(0.6)
        assert hangs == []
        assert wait_for(lambda: hangs, 5), 'after a save or a load nobody would be named any more'
    assert hangs[0].args[0] == 'no step was done in 0.2 s: ranks [0] stuck'


def test_a_pause_that_an_error_ends_is_over_too(tmp_path):
    hangs = []
    with HangWatch(tmp_path, 0.2, act=hangs.append) as watch:
        with pytest.raises(OSError), watch.paused(): raise OSError('the disk is full')
        assert wait_for(lambda: hangs, 5)
