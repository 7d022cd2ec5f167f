"""The library's own trainer on real ranks, in processes whose allocator is counted by glibc itself.

The caller starts this program with the variables of `heap.COUNTING`, so that every tensor is an
mmapped block, and gives recipes as lines of JSON; their `model.source` is a folder with a
config.json. Nothing watches the operations of the first two steps, whose most bytes count; the
third tells its collectives and its FLOP. Answers each line with one: what each rank measured, or
the error.
"""
import gc
import json
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack, contextmanager

from bench.shared.heap import held_b, highest_b, mapped_b, wait_for_release
from bench.shared.models import build, rows
from bench.shared.real_ranks import recorded, warm_up
from bench.shared.small_rehearsals import QUIET, STEPS


def multiply(A, B, shape, *args, out_shape=None, **kwargs) -> int:
    "FLOP of bitsandbytes' product with a packed matrix, 2 M N K: torch's counter has no formula."
    return 2 * A[:-1].numel() * shape[0] * shape[1]


def no_flops(*args, **kwargs) -> int: return 0


LARGE_B = 2**20  # Smaller copies than this do not decide a peak
OF_FSDP2 = 'all_gather_single', 'reduce_scatter_single'  # In torch.distributed
OF_OLDER = 'all_gather_into_tensor', 'reduce_scatter_tensor'  # Their names in an older torch


@contextmanager
def no_late_copies():
    """Let each large collective of FSDP2 return only when gloo has freed its copy of the tensor.

    Else the copy is sometimes still there when the next tensor is made, and the peak is that of a
    race between two threads.
    """
    from unittest.mock import patch
    import torch.distributed as dist
    from torch import Tensor

    def waiting(collective):
        def run(*args, **kwargs):
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            before_b, size_b = mapped_b(), max(tensor.nbytes for tensor in tensors)
            work = collective(*args, **kwargs)
            if work is None and size_b >= LARGE_B: wait_for_release(before_b, size_b)
            return work
        return run

    with ExitStack() as stack:
        for name in OF_FSDP2 if hasattr(dist, OF_FSDP2[0]) else OF_OLDER:
            stack.enter_context(patch.object(dist, name, waiting(getattr(dist, name))))
        yield


class Phase:
    "What torch does when a collective runs, as `recorded` asks for it."
    def __getitem__(self, _) -> str:
        import torch
        return 'backward' if torch._C._current_graph_task_id() != -1 else ''


def watch(measured: dict, trainer):
    "A callback that reads the heap after each quiet step, and watches the last step of the log."
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import TrainerCallback
    aten = torch.ops.aten
    formulas = {
        torch.ops.bitsandbytes.gemm_4bit: multiply,
        # A rehearsal counts the attention of GPUs alone; torch counts that of CPUs since 2.15
        aten._scaled_dot_product_flash_attention_for_cpu: no_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: no_flops}
    flops = FlopCounterMode(display=False, custom_mapping=formulas)
    messages = recorded(measured['collectives'], Phase())

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **more):
            if state.global_step <= QUIET: measured['highest'].append(highest_b())
            if state.global_step == QUIET:
                inner = getattr(optimizer, 'optimizer', optimizer)
                measured['held_b'] = held_b(trainer.model_wrapped, inner)  # DDP's buckets too
                measured['other_b'] = mapped_b() - measured['held_b']

        def on_log(self, args, state, control, logs=None, **more):
            if 'loss' not in logs: return
            if state.global_step == QUIET:
                messages.__enter__()
                flops.__enter__()
            if state.global_step == STEPS:
                flops.__exit__(None, None, None)
                messages.__exit__(None, None, None)
            measured['flops'] = flops.get_total_flops()
    return Watch()


def rank(job: dict) -> dict:
    "Bytes held between steps, the most held, the collectives of one step and its FLOP."
    import torch
    from llm_workbook.config.recipe import Recipe
    from llm_workbook.files import resolve
    from llm_workbook.parallel.backends import cpu_fsdp
    from llm_workbook.training.trainer import make_trainer
    from transformers import AutoTokenizer
    torch.set_num_threads(1)
    began = time.monotonic()
    recipe = Recipe.model_validate(job)
    measured = {'collectives': [], 'highest': []}
    with cpu_fsdp(), tempfile.TemporaryDirectory() as folder:
        model = build(recipe)
        tokenizer = AutoTokenizer.from_pretrained(resolve('tiny-base'))
        data = rows(recipe, model.config.vocab_size, STEPS)
        trainer = make_trainer(recipe, folder, data, model, tokenizer)
        if recipe.method.objective == 'dpo':  # Scored before, as far as a step can tell
            trainer.pair_collator.reference = torch.zeros(len(data), 2)
        del model
        trainer.add_callback(watch(measured, trainer))
        built_b = highest_b()
        trainer.began = time.monotonic()
        ready_s = trainer.began - began
        with no_late_copies(): trainer.train()
    first_b, peak_b = measured.pop('highest')
    other_b = measured['other_b']
    return measured | {
        'built_b': built_b - other_b,
        'first_b': first_b - other_b,
        'peak_b': peak_b - other_b,
        'ready_s': round(ready_s, 1),
        'seconds': round(time.monotonic() - began, 1),
        'strategy': trainer.shards.strategy,
    }


def measured(job: dict) -> list[dict]:
    "Run a recipe on its ranks; what each saw."
    from llm_workbook import Recipe, fsdp_env
    from llm_workbook.parallel.ranks import notebook_ranks
    recipe = Recipe.model_validate(job)
    if recipe.sharding.strategy.startswith('zero'): warm_up()
    return notebook_ranks(rank, recipe.cluster.ranks, (job,), 300, fsdp_env(recipe))


def main() -> None:
    "Answer each line of the input, until there is none."
    warnings.filterwarnings('ignore')
    gc.disable()  # Imports leave no garbage, and to look for it takes a second
    # Imported once, before the forks; `trl` alone brings no trainer
    import llm_workbook.model.quantize, peft, transformers, trl  # noqa: E401, F401
    import llm_workbook.training.trainer, trl.trainer.sft_trainer  # noqa: E401, F401
    import torch.distributed.fsdp, torch.utils.flop_counter  # noqa: E401, F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    transformers.logging.set_verbosity_error()
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        try: answer = {'ranks': measured(json.loads(line))}
        except Exception as error: answer = {'error': str(error)}
        print(f'\n{json.dumps(answer)}', flush=True)  # Ranks may have left half a line


if __name__ == '__main__':
    main()
