"""The disk is full in the middle of a save, and half a checkpoint stays."""
import resource
import signal

from resume_from_partial_checkpoint import trainer

from llm_workbook.checkpoint.disk import check_disk


def broken():
    "A limit on the size of files does what a full disk does."
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    made = trainer()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try: made.train()
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def mended():
    "The library asks the disk before a byte is written."
    try: check_disk('.', 2**60)
    except OSError as error:
        assert 'are free' in str(error)
        return
    raise AssertionError('2**60 bytes are said to fit')
