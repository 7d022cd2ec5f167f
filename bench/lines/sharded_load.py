"""Seconds and memory until two ranks hold their shares of a 1.1 B-parameter NF4 base.

The peer is transformers with accelerate.
"""
import ctypes
import gc
import json
import re
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from bench.record import record

CONFIG = {'model_type': 'llama', 'architectures': ['LlamaForCausalLM'], 'hidden_size': 2048,
          'intermediate_size': 5632,
          'num_attention_heads': 32, 'num_key_value_heads': 4, 'vocab_size': 32000,
          'max_position_embeddings': 2048,
          'tie_word_embeddings': False, 'dtype': 'bfloat16', 'num_hidden_layers': 22}
EACH_B = 400_000_000  # Bytes of one shard file, about
PEER = 'transformers.from_pretrained in 4 bits on every rank, then accelerate.prepare'


# The checkpoint

def make_checkpoint(folder: Path, layers: int) -> Path:
    "Write random bfloat16 weights of the configuration into several shard files."
    import torch
    from llm_workbook.model.architecture import skeleton
    from safetensors.torch import save_file
    config = CONFIG | {'num_hidden_layers': layers}
    torch.manual_seed(0)
    file_of = {}
    for number, shapes in enumerate(divided(skeleton(config).named_parameters()), 1):
        file = f'model-{number:05}.safetensors'
        tensors = {name: torch.randn(shape).mul_(.02).bfloat16() for name, shape in shapes.items()}
        save_file(tensors, folder/file, metadata={'format': 'pt'})
        file_of |= dict.fromkeys(shapes, file)
    index = {'metadata': {}, 'weight_map': file_of}
    (folder/'model.safetensors.index.json').write_text(json.dumps(index))
    (folder/'config.json').write_text(json.dumps(config))
    return folder


def divided(parameters) -> list[dict]:
    "Divide the parameters over shard files in their order; give name -> shape for each file."
    files = [{}]
    room_b = EACH_B
    for name, parameter in parameters:
        size_b = 2 * parameter.numel()
        if size_b > room_b:
            files.append({})
            room_b = EACH_B
        files[-1][name] = parameter.shape
        room_b -= size_b
    return files


# Memory

def anonymous_b() -> int:
    "Read the bytes of this process that are in anonymous pages."
    status = Path('/proc/self/status').read_text()
    return int(re.search(r'^RssAnon:\s+(\d+)', status, re.M)[1]) * 1024


def trim() -> None:
    "Make Python and the C library give back all memory that was freed."
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def anonymous_trace():
    """Trace the private memory that a block adds: the rise of anonymous pages, every 5 ms.

    The resident set would count the pages of mapped files, which the system can drop at any time,
    and which only the peer has.
    """
    trim()
    begin_b = anonymous_b()
    trace = SimpleNamespace(peak_b=0, rest_b=None, trimmed_b=None)
    is_done = threading.Event()

    def watch():
        while not is_done.wait(.005): trace.peak_b = max(trace.peak_b, anonymous_b() - begin_b)
    thread = threading.Thread(target=watch)
    thread.start()
    try: yield trace
    finally:
        is_done.set()
        thread.join()
        gc.collect()
        trace.rest_b = anonymous_b() - begin_b
        trim()
        trace.trimmed_b = anonymous_b() - begin_b


# One rank, and all of them

def load(recipe) -> dict:
    "Load adapters on a 4-bit base on one rank; give the time, and the memory it took and holds."
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from llm_workbook.model.adapters import add_adapters
    from llm_workbook.parallel.load import loaded_base
    from llm_workbook.model.quantize import fingerprint
    from llm_workbook.parallel.backends import cpu_fsdp
    from llm_workbook.parallel.shard import assert_sharding
    dist.barrier()
    with anonymous_trace() as memory, cpu_fsdp():
        begin = time.monotonic()
        with loaded_base(recipe) as base:
            model = add_adapters(base, recipe.method)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
        dist.barrier()
        seconds = time.monotonic() - begin
    shards = assert_sharding(model)
    arrived = getattr(base, 'arrived', None)  # The peer counts nothing
    return {'seconds': round(seconds, 2), 'peak_b': memory.peak_b, 'rest_b': memory.rest_b,
            'trimmed_b': memory.trimmed_b,
            'here_b': shards.here_b,
            'replicated_b': shards.replicated_b, 'read_b': arrived and arrived.read_b,
            'total_b': arrived and arrived.total_b,
            'fingerprint': fingerprint(model).digest}


def warm_up() -> None:
    "Import once what every rank needs; ranks are forks of this process."
    import accelerate  # noqa: F401
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import transformers
    from llm_workbook.model.adapters import add_adapters
    from llm_workbook.model.quantize import load_nf4
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    # What this imports would else count as memory of the ranks
    add_adapters(load_nf4('tiny-base', device='cpu'))


def measure(layers: int = 22, turns: tuple = ('sharded', 'every_rank', 'sharded'),
            ranks: int = 2) -> dict:
    "Load the same checkpoint in turns: ours before and after the peer."
    from llm_workbook.parallel.ranks import run_ranks
    from llm_workbook.config.recipe import Data, Method, Model, Recipe
    from llm_workbook.parallel.backends import fsdp_env
    warm_up()
    runs = {turn: [] for turn in turns}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), layers)
        sizes_b = [file.stat().st_size for file in Path(folder).glob('*.safetensors')]
        plain = Recipe(name='sharded-load', model=Model(source=folder),
                       data=Data(source='sample-conversations'),
                       method=Method(rank=4))
        for turn in turns:
            recipe = plain.changed({'sharding.loading': turn, 'cluster.processes': ranks})
            runs[turn].append(run_ranks(load, ranks, (recipe,), 400, fsdp_env(recipe)))
    facts = {'files': len(sizes_b), 'files_b': sum(sizes_b), 'layers': layers, 'ranks': ranks}
    return judged(runs['sharded'], runs['every_rank'], facts)


# The record

def largest(runs: list, key: str) -> list:
    "Give for each run the value of the rank that has the largest."
    return [max(rank[key] for rank in run) for run in runs]


def judged(ours: list, peers: list, facts: dict) -> dict:
    "Make the record: the slowest rank counts for time, the rank that holds most for memory."
    def ratio(key): return round(max(largest(ours, key)) / min(largest(peers, key)), 3)
    fingerprints = {rank['fingerprint'] for run in ours + peers for rank in run}
    read_b = max(largest(ours, 'read_b'))
    return record('sharded_load', largest(ours, 'seconds'), 's', largest(peers, 'seconds'),
                  goal=.35, peer=PEER,
                  peak_ratio=ratio('peak_b'), peak_goal=.5,
                  rest_ratio=ratio('rest_b'), rest_goal=.55,
                  trimmed_ratio=ratio('trimmed_b'),
                  read_share=round(read_b / facts['files_b'], 4), read_goal=.55,
                  same_bytes=len(fingerprints) == 1,
                  **facts, per_rank={'ours': ours, 'peer': peers})
