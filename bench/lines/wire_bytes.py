"""What two nodes really send in a step, by the counters of their interfaces, and `estimate_step`.

Two network namespaces, joined by a pair of virtual links, stand for two nodes of one rank each:
every byte between the ranks passes an interface that nothing else uses. Needs root. The base is
random, and large enough for steps of over 50 MB.
"""
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from bench.programs.wire import FIRST, STEPS
from bench.record import ROOT, Skip, record

CONFIG = {'model_type': 'llama', 'hidden_size': 512, 'intermediate_size': 1408,
          'num_hidden_layers': 6, 'num_attention_heads': 8,
          'num_key_value_heads': 8, 'vocab_size': 1280, 'tie_word_embeddings': True,
          'max_position_embeddings': 512}
STRATEGIES = 'fsdp2', 'ddp', 'zero3'
# In namespaces that lead nowhere else
NAMES, ADDRESSES = ('llmw-wire1', 'llmw-wire2'), ('10.84.0.1', '10.84.0.2')


def make_base(folder: Path) -> Path:
    "Write a random model of CONFIG, in float32, with the tokenizer of the tiny base."
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from llm_workbook.files import asset
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG),
                                                 dtype=torch.float32)
    model.save_pretrained(folder)
    for path in asset('tiny-base').iterdir():
        there = (folder/path.name).exists()
        if not there and path.suffix != '.safetensors': shutil.copy(path, folder)
    return folder


def recipe_for(strategy: str, base: Path):
    "A full fine-tune of `base` on two nodes of one process."
    from llm_workbook.config.recipe import Recipe
    return Recipe.named('reviews-qlora').changed({
        'name': f'wire-{strategy}', 'model': {'source': str(base)}, 'method.kind': 'full',
        'data': {'source': 'sample-conversations', 'format': 'messages'},
        'cluster': {'nodes': 2, 'processes': 1, 'hardware': 'cpu', 'interface': 'eth0'},
        'sharding.strategy': strategy, 'precision.compute': 'float32',
        'batch': {'micro': 1, 'length': 64},
        'optimizer.steps': FIRST + STEPS + 1, 'zero.reduce_bucket': 5_000_000,
        'zero.prefetch_bucket': 5_000_000})


@contextmanager
def two_nodes():
    "Two networks with an interface eth0 each; yields the words that run a command there."
    if os.geteuid() or not shutil.which('ip') or not shutil.which('nsenter'):
        raise Skip('two networks need root, ip and nsenter')
    def ip(*words): subprocess.run(['ip', *words], check=True, capture_output=True)
    try:
        for name in NAMES: ip('netns', 'add', name)
        ip('-n', NAMES[0], 'link', 'add', 'eth0', 'type', 'veth', 'peer', 'name', 'eth0', 'netns',
           NAMES[1])
        for name, address in zip(NAMES, ADDRESSES):
            ip('-n', name, 'addr', 'add', f'{address}/24', 'dev', 'eth0')
            for face in 'lo', 'eth0': ip('-n', name, 'link', 'set', face, 'up')
        yield [['nsenter', f'--net=/run/netns/{name}'] for name in NAMES]
    except subprocess.CalledProcessError as error:
        raise Skip(f'no right to make networks: {error.stderr.decode().strip()}') from None
    finally:
        for name in NAMES: subprocess.run(['ip', 'netns', 'del', name], capture_output=True)


def start(recipe, folder: Path, nodes: list, head: str = ADDRESSES[0],
          timeout_s: float = 240) -> list[dict]:
    "Run `recipe` over both nodes, each entered by its words in `nodes`; give what each counted."
    recipe.save(folder/'recipe.yaml'), (folder/'run').mkdir()
    env = {**os.environ, 'WORLD_SIZE': '2', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1',
           'MASTER_ADDR': head,
           'MASTER_PORT': '29400', 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1',
           'TOKENIZERS_PARALLELISM': 'false'}
    words, ranks = [sys.executable, '-m', 'bench.programs.wire', folder/'recipe.yaml', folder/'run',
                    folder], []
    for rank, enter in enumerate(nodes):
        with open(folder/f'log{rank}', 'w') as log:
            own = {'cwd': ROOT, 'env': env | {'RANK': str(rank)}, 'stdout': log, 'stderr': log}
            ranks.append(subprocess.Popen([*map(str, [*enter, *words])], **own))
    try:
        if any([rank.wait(timeout_s)
                for rank in ranks]): raise RuntimeError((folder/'log0').read_text()[-3000:])
    finally:
        for rank in ranks: rank.kill(), rank.wait()
    return [json.loads((folder/f'rank{i}.json').read_text()) for i in (0, 1)]


def compare(recipe, counted: list[dict]) -> dict:
    "Set what was counted beside what is planned for gloo, and for NCCL."
    from llm_workbook.config.hardware import node
    from llm_workbook.plan.step_time import estimate_step
    box = node('cpu')
    planned, nccl = (estimate_step(recipe, node=n).wire_b
                     for n in (box, box.changed(backend='nccl')))
    made = {'strategy': recipe.sharding.strategy, 'planned_b': planned, 'planned_nccl_b': nccl,
            'steps': STEPS,
            'sent_b': [c['sent_b'] // STEPS for c in counted],
            'received_b': [c['received_b'] // STEPS for c in counted],
            'step_s': round(max(c['seconds'] for c in counted) / STEPS, 3)}
    return made | {'ratios': [round(b / planned, 4) for b in made['sent_b'] + made['received_b']]}


def measure(strategies: tuple = STRATEGIES) -> dict:
    "Run every strategy over the two nodes."
    with tempfile.TemporaryDirectory(prefix='llmw-wire-') as folder, two_nodes() as nodes:
        base, runs = make_base(Path(folder)/'base'), []
        for strategy in strategies:
            (here := Path(folder)/strategy).mkdir()
            runs.append(compare(recipe := recipe_for(strategy, base), start(recipe, here, nodes)))
    each = [100 * abs(statistics.mean(run['ratios']) - 1) for run in runs]
    return record('wire_bytes', each, '% of the plan', goal=15.0, runs=runs, packages=['deepspeed'])
