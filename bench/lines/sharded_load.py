"""Seconds and memory until two ranks hold their shares of a 1.1 B-parameter NF4 base.

The peer is transformers with accelerate.
"""
import ctypes
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


def make_checkpoint(folder: Path, layers: int) -> Path:
    "Write random bfloat16 weights of the configuration in several shard files, a tensor at a time."
    import torch
    from llm_workbook.model.architecture import skeleton
    from safetensors.torch import save_file
    config, shards, room = CONFIG | {'num_hidden_layers': layers}, [{}], EACH_B
    torch.manual_seed(0)
    where = {}

    def close():
        save_file(shards[-1], folder/f'model-{len(shards):05}.safetensors',
                  metadata={'format': 'pt'})
        shards[-1].clear()
    for name, p in skeleton(config).named_parameters():
        if room < 2 * p.numel():
            close(), shards.append({})
            room = EACH_B
        shards[-1][name], room = torch.randn(p.shape).mul_(.02).bfloat16(), room - 2 * p.numel()
        where[name] = f'model-{len(shards):05}.safetensors'
    close()
    (folder/'model.safetensors.index.json').write_text(json.dumps({'metadata': {},
                                                                   'weight_map': where}))
    (folder/'config.json').write_text(json.dumps(config))
    return folder


@contextmanager
def anonymous_trace():
    """Trace the private memory that a block adds: the rise of anonymous pages, every 5 ms.

    The resident set would count the pages of mapped files, which the system can drop at any time,
    and which only the peer has.
    """
    import gc
    read = lambda: int(re.search(r'^RssAnon:\s+(\d+)', Path('/proc/self/status').read_text(),
                                 re.M)[1]) * 1024
    trim = lambda: (gc.collect(), ctypes.CDLL(None).malloc_trim(0))
    trim()
    begin, done = read(), threading.Event()
    seen = SimpleNamespace(peak_b=0, rest_b=None, trimmed_b=None)

    def look():
        while not done.wait(.005): seen.peak_b = max(seen.peak_b, read() - begin)
    thread = threading.Thread(target=look)
    thread.start()
    try: yield seen
    finally:
        done.set(), thread.join(), gc.collect()
        seen.rest_b = read() - begin
        trim()
        # What is left when the C library gives back all that was freed
        seen.trimmed_b = read() - begin


def load(recipe) -> dict:
    "Be one rank: adapters on a 4-bit base, sharded by accelerate; what it took and what it holds."
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
    shards, arrived = assert_sharding(model), getattr(base, 'arrived', None)
    return {'seconds': round(seconds, 2), 'peak_b': memory.peak_b, 'rest_b': memory.rest_b,
            'trimmed_b': memory.trimmed_b,
            'here_b': shards.here_b,
            'replicated_b': shards.replicated_b, 'read_b': arrived and arrived.read_b,
            'total_b': arrived and arrived.total_b,
            'fingerprint': fingerprint(model).digest}


def warm_up() -> None:
    "Import once what every rank needs; ranks are forks of this process."
    import accelerate, bitsandbytes, peft, transformers  # noqa: E401, F401
    import torch.distributed.fsdp, torch.distributed.tensor  # noqa: E401, F401
    from llm_workbook.model.adapters import add_adapters
    from llm_workbook.model.quantize import load_nf4
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    # What this imports would else count as memory of the ranks
    add_adapters(load_nf4('tiny-base', device='cpu'))


def measure(layers: int = 22, turns: tuple = ('sharded', 'every_rank', 'sharded'),
            ranks: int = 2) -> dict:
    "Load the same checkpoint in turns; ours before and after the peer."
    from llm_workbook.parallel.ranks import run_ranks
    from llm_workbook.config.recipe import Data, Method, Model, Recipe
    from llm_workbook.parallel.backends import fsdp_env
    warm_up()
    runs = {turn: [] for turn in turns}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), layers)
        files = sorted(Path(folder).glob('*.safetensors'))
        plain = Recipe(name='sharded-load', model=Model(source=folder),
                       data=Data(source='sample-conversations'),
                       method=Method(rank=4))
        for turn in turns:
            recipe = plain.changed({'sharding.loading': turn, 'cluster.processes': ranks})
            runs[turn].append(run_ranks(load, ranks, (recipe,), 400, fsdp_env(recipe)))
        facts = {'files': len(files), 'files_b': sum(file.stat().st_size for file in files)}
    return judged(runs['sharded'], runs['every_rank'], facts | {'layers': layers, 'ranks': ranks})


def judged(ours: list, peers: list, facts: dict) -> dict:
    "Make the record: the slowest rank counts for time, the one that holds most for memory."
    most = lambda runs, key: [max(rank[key] for rank in run) for run in runs]
    ratio = lambda key: round(max(most(ours, key)) / min(most(peers, key)), 3)
    prints = {rank['fingerprint'] for run in ours + peers for rank in run}
    return record('sharded_load', most(ours, 'seconds'), 's', most(peers, 'seconds'), goal=.35,
                  peer='transformers.from_pretrained in 4 bits on every rank, '
                       'then accelerate.prepare',
                  peak_ratio=ratio('peak_b'), peak_goal=.5, rest_ratio=ratio('rest_b'),
                  rest_goal=.55,
                  trimmed_ratio=ratio('trimmed_b'),
                  read_share=round(max(most(ours, 'read_b')) / facts['files_b'], 4), read_goal=.55,
                  same_bytes=len(prints) == 1,
                  **facts, per_rank={'ours': ours, 'peer': peers})
