"What pages and tests import once, so that the processes they fork need not."
import os
import tempfile
from importlib.util import find_spec
from unittest.mock import patch


def bring_libraries() -> None:
    """Import what every rank imports: without it, most of a short rank's time.

    DeepSpeed is one of them: accelerate imports it wherever it is installed.
    """
    import llm_workbook.model.quantize  # noqa: F401  First: it silences bitsandbytes
    import datasets, peft, torch.distributed.checkpoint, torch.distributed.fsdp  # noqa: E401, F401
    import transformers.trainer, trl.trainer.sft_trainer  # noqa: E401, F401
    if find_spec('deepspeed') is None: return
    with tempfile.TemporaryDirectory() as folder:
        # It opens a cache at import
        names = {'TORCHINDUCTOR_CACHE_DIR': folder, 'DS_ACCELERATOR': 'cpu'}
        with patch.dict(os.environ, names):
            import deepspeed, torch.utils.cpp_extension  # noqa: E401, F401
