"""The peak of a step as `instant_lines` predicts it, against glibc's count on CPU processes."""
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from bench.record import ROOT, record
from bench.shared.heap import COUNTING

SHAPES = {  # 50 to 200 million parameters each
    'llama': dict(model_type='llama', hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                  num_attention_heads=12,
                  num_key_value_heads=4, vocab_size=16_000),
    'words': dict(model_type='llama', hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
                  num_attention_heads=8,
                  num_key_value_heads=4, vocab_size=64_000, tie_word_embeddings=True),
    'wide': dict(model_type='llama', hidden_size=768, intermediate_size=4096, num_hidden_layers=8,
                 num_attention_heads=12,
                 num_key_value_heads=4, vocab_size=2_000),
    'qwen': dict(model_type='qwen3', hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
                 num_attention_heads=8,
                 num_key_value_heads=4, head_dim=96, vocab_size=8_000),
    'moe': dict(model_type='mixtral', hidden_size=512, intermediate_size=1024, num_hidden_layers=6,
                num_attention_heads=8,
                num_key_value_heads=4, vocab_size=8_000, num_local_experts=8,
                num_experts_per_tok=2),
    'window': dict(model_type='mistral', hidden_size=768, intermediate_size=2048,
                   num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=4,
                   vocab_size=8_000, sliding_window=256)}
BF16, FULL = {'precision.compute': 'bfloat16'}, {'sharding.activation_checkpointing': 'full'}
PURE = BF16 | {'precision.master': 'bfloat16'}
FSDP, DDP = ({'sharding.strategy': strategy, 'cluster.processes': 2}
             for strategy in ('fsdp2', 'ddp'))
SEGMENTS = {'model.attention': 'segments'}  # `borders` in bench.shared.models: three examples
COMPILE = {'model.kernels': 'compile'}
HYBRID = {'cluster.processes': 4, 'sharding.group': 2}
SYNC = {'sharding.sync_each_batch': True}  # Each of several passes reduces its gradients
LORA, QLORA = {'method.kind': 'lora'} | BF16, {'method.kind': 'qlora'} | BF16
PACKED = {'batch.packing': True}
CHUNKED, ONE_PASS = ({'batch.loss_head': head} for head in ('chunked', 'one_pass'))
DORA = {'method.dora': True}
PAIRS = {'data.format': 'preference', 'method.objective': 'dpo', 'batch.loss_head': 'chunked'}


def size(micro: int, length: int, accumulation: int = 1) -> dict:
    "The batch of a job, as changes to a recipe."
    return {'batch.micro': micro, 'batch.length': length, 'batch.accumulation': accumulation}


# Shape, changes to a plain fp32 full fine-tune on one process, and whether AdamW goes through all
# weights at once
JOBS = [
    ('llama', size(1, 256), False), ('llama', size(1, 128), True), ('words', size(1, 512), False),
    ('wide', size(1, 1024) | FULL | PURE, False), ('llama', size(2, 256, 2), False),
    ('llama', size(1, 1024) | BF16, False), ('wide', size(2, 512) | PURE
                                             | {'model.attention': 'eager'}, False),
    ('qwen', size(1, 384), False), ('moe', size(1, 512) | PURE, False),
    ('llama', size(1, 512) | LORA, False), ('wide', size(1, 1024) | LORA | FULL, False),
    ('wide', size(1, 1024) | QLORA, False), ('wide', size(1, 512) | LORA | DORA, False),
    ('llama', size(1, 512) | QLORA | DORA | FULL, False),
    ('llama', size(1, 512) | QLORA | FULL | PURE, False), ('llama', size(1, 128) | DDP, False),
    ('words', size(1, 256) | PURE | CHUNKED, False),
    ('words', size(1, 512) | PURE | ONE_PASS, False),
    ('words', size(1, 512) | LORA | FULL | ONE_PASS, False),
    ('wide', size(1, 512) | DDP | LORA, False), ('llama', size(1, 512) | FSDP, False),
    ('llama', size(1, 512) | FSDP | BF16 | FULL, False),
    ('wide', size(1, 512) | FSDP | BF16, False),
    ('llama', size(1, 128, 2) | FSDP, False), ('llama', size(1, 128, 2) | FSDP | SYNC, False),
    ('wide', size(1, 256, 3) | FSDP | PURE | SYNC, False),
    ('words', size(1, 64) | FSDP | BF16 | HYBRID, False),
    ('words', size(1, 64, 2) | FSDP | BF16 | HYBRID | SYNC, False),
    ('wide', size(1, 1024) | FSDP | QLORA, False),
    ('wide', size(1, 256, 2) | BF16 | FULL, False), ('words', size(1, 64, 2), False),
    ('llama', size(1, 256, 2) | BF16 | CHUNKED, False),
    ('llama', size(1, 256, 2) | BF16 | FULL | CHUNKED, False),
    ('words', size(1, 256, 2) | BF16 | FULL | ONE_PASS, False),
    ('wide', size(1, 512, 2) | DDP | BF16 | FULL, False),
    ('wide', size(1, 1024) | LORA | ONE_PASS | {'method.dropout': 0.1}, False),
    ('llama', size(2, 256) | PACKED, False), ('wide', size(1, 1024) | LORA | PACKED, False),
    ('llama', size(1, 1024) | BF16 | SEGMENTS, False),
    ('window', size(1, 1024) | PURE | SEGMENTS, False),
    ('wide', size(1, 1024) | LORA | SEGMENTS, False),
    ('llama', size(1, 1024) | BF16 | COMPILE, False),
    ('llama', size(1, 1024) | BF16 | SEGMENTS | COMPILE, False),
    ('wide', size(2, 512) | PURE | COMPILE, False), ('qwen', size(1, 384) | COMPILE, False),
    ('wide', size(1, 1024) | LORA | COMPILE, False),
    ('wide', size(1, 1024) | LORA | FULL | COMPILE, False),
    ('wide', size(1, 1024) | QLORA | COMPILE, False),
    ('wide', size(1, 1024) | FSDP | LORA | FULL | COMPILE, False),
    ('wide', size(1, 512) | FSDP | LORA | DORA, False),
    ('llama', size(1, 512) | PAIRS, False), ('wide', size(1, 512) | LORA | FULL | PAIRS, False),
    ('words', size(1, 256) | PURE | PAIRS, False), ('wide', size(2, 256, 2) | LORA | PAIRS, False),
    ('wide', size(1, 512) | FSDP | QLORA | PAIRS, False),
    ('llama', size(1, 256) | FSDP | BF16 | PAIRS, False)]

JUDGES = {'intervals.evaluation': 1, 'batch.loss_head': 'chunked'}
JUDGED = [  # Shape and changes: evaluations, far smaller than their steps; of pairs: references
    ('llama', size(2, 512)), ('words', size(1, 1024)), ('wide', size(2, 1024) | LORA),
    ('wide', size(2, 1024) | QLORA | FULL), ('moe', size(1, 1024) | PURE),
    ('llama', size(2, 1024) | BF16), ('llama', size(4, 1024) | FSDP | BF16),
    ('wide', size(2, 2048) | FSDP | QLORA), ('llama', size(1, 512) | PAIRS),
    ('wide', size(1, 1024) | FSDP | LORA | PAIRS)]


def recipe(changes: dict):
    "A plain full fine-tune in float32 on one CPU process, with `changes`."
    from llm_workbook import Recipe
    plain = Recipe(name='step-peak', model={'source': 'tiny-base'},
                   data={'source': 'sample-conversations'},
                   method={'kind': 'full'}, cluster={'processes': 1}, sharding={'strategy': 'none'},
                   precision={'compute': 'float32'}, batch={'loss_head': 'full'})
    return plain.changed(changes)


def environment(made) -> dict:
    """What accelerate reads, as `fsdp_env` says it.

    There is autocast where trained float32 weights compute in 16 bits.
    """
    from llm_workbook import fsdp_env
    precision = made.precision.master, made.precision.compute
    mixed = made.method.kind == 'full' and precision == ('float32', 'bfloat16')
    again = made.sharding.activation_checkpointing == 'full'
    return fsdp_env(made) | {'ACCELERATE_MIXED_PRECISION': 'bf16' if mixed else 'no',
                             'FSDP_TRANSFORMER_CLS_TO_WRAP': 'LlamaDecoderLayer',
                             'FSDP_ACTIVATION_CHECKPOINTING': str(again).lower()}


def real(shape: str, changes: dict, foreach: bool = False) -> dict:
    "Run two steps in a process of their own; what rank 0 saw."
    made = recipe(changes)
    job = {'config': SHAPES[shape], 'recipe': made.model_dump(mode='json'),
           'env': environment(made), 'foreach': foreach or None}
    done = subprocess.run([sys.executable, '-m', 'bench.programs.step_peak'], input=json.dumps(job),
                          env=os.environ | COUNTING, cwd=ROOT, capture_output=True, text=True)
    if done.returncode: raise RuntimeError(f'{shape}, {changes}: {done.stderr[-2000:]}')
    return json.loads(done.stdout.splitlines()[-1])[0]


def predicted(shape: str, changes: dict, foreach: bool = False) -> tuple[str, int]:
    "The fullest instant and its bytes, DDP's buckets apart, which the process counts as held."
    from llm_workbook import instant_lines, spec
    if foreach: changes = changes | {'cluster.device': 'cuda'}
    lines = instant_lines(spec(SHAPES[shape]), recipe(changes))
    sums = {name: sum(line.size_b for line in held if line.kind != 'buffers')
            for name, held in lines.items()}
    name = max(sums, key=sums.get)
    return name, sums[name]


def row(job: tuple, saw: dict) -> dict:
    "One row of the record: a job, what a process saw, and what was predicted."
    shape, changes, foreach = job
    instant, transient_b = predicted(*job)
    ours_b = saw['held_b'] + transient_b
    if saw['built_b'] >= saw['peak_b']:
        raise RuntimeError(f'{shape}, {changes}: building the model took more than a step')
    asked = changes.get('sharding.strategy') == 'fsdp2'
    if saw['sharded'] != asked: raise RuntimeError(f'{shape}, {changes}: not sharded as asked')
    from llm_workbook import spec
    kept = 'held_b first_b peak_b seconds'.split()
    return {'shape': shape, 'changes': changes | ({'foreach': True} if foreach else {}),
            'instant': instant, 'predicted_b': ours_b,
            'error': round(100 * (ours_b / saw['peak_b'] - 1), 3),
            'parameters': spec(SHAPES[shape]).parameters,
            **{key: saw[key] for key in kept}}


def judged(job: tuple, saw: dict) -> dict:
    "One row for an evaluation: what a process saw, and what was predicted beside what it holds."
    from llm_workbook import evaluation_lines, spec
    shape, changes, _ = job
    if saw['built_b'] >= saw['peak_b']:
        raise RuntimeError(f'{shape}, {changes}: building the model took more than an evaluation')
    sums = {}
    for line in evaluation_lines(recipe(changes), spec(SHAPES[shape])):
        if line.instant: sums[line.instant] = sums.get(line.instant, 0) + line.size_b
    instant = max(sums, key=sums.get)
    ours_b = saw['held_b'] + sums[instant]
    return {'shape': shape, 'changes': changes, 'instant': instant, 'predicted_b': ours_b,
            'error': round(100 * (ours_b / saw['peak_b'] - 1), 3), 'held_b': saw['held_b'],
            'peak_b': saw['peak_b'], 'seconds': saw['seconds']}


def compare(shape: str, changes: dict, foreach: bool = False) -> dict:
    "Run one job and predict it."
    return row((shape, changes, foreach), real(shape, changes, foreach))


def run_all(jobs: list[tuple]) -> list[dict]:
    "What a process saw of each job: those of one process two at a time, then those of two."
    def run(which: list, at_once: int) -> list:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda job: real(*job), which))

    pairs = ['cluster.processes' in changes for _, changes, _ in jobs]
    alone = iter(run([job for job, pair in zip(jobs, pairs) if not pair], 2))
    together = iter(run([job for job, pair in zip(jobs, pairs) if pair], 1))
    return [next(together if pair else alone) for pair in pairs]


def measure() -> dict:
    "Run every job; the value is the median error."
    evaluations = [(shape, changes | JUDGES, False) for shape, changes in JUDGED]
    seen = run_all(JOBS + evaluations)
    rows = [row(job, saw) for job, saw in zip(JOBS, seen)]
    judgements = [judged(job, saw) for job, saw in zip(evaluations, seen[len(JOBS):])]
    errors = [abs(made['error']) for made in rows + judgements]
    return record('step_peak_error', errors, '%', goal=2, rows=rows, evaluations=judgements)
