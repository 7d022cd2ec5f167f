"""8-bit AdamW on ranks, against one process and against 32 bits.

bitsandbytes keeps one scale for 256 numbers that lie side by side. Under DDP every rank has whole
tensors, with the blocks of one process. DeepSpeed gives it one flat part of all tensors: other
blocks, another rounding, and no rank can have those of one process. transformers keeps the states
of an embedding in 32 bits, which DeepSpeed's flat part hides. So under ZeRO a loss may differ from
that of one process by what 8 bits differ from 32, on both sides.
"""
import functools
import os

import pytest

os.environ.setdefault('DS_ACCELERATOR', 'cpu')
from trouble import slow_case, small_recipe, some_rows

from llm_workbook.config.recipe import Recipe
from llm_workbook.training.fine_tune import fine_tune

STEPS = 6
ZERO = {'zero.persistence_threshold': 1000, 'zero.reduce_bucket': 1_000_000,
        'zero.allgather_bucket': 1_000_000, 'zero.prefetch_bucket': 1_000_000}


@pytest.fixture(scope='module')
def losses(tmp_path_factory):
    "A function that trains all weights on 8 rows a step, once in each way, and gives the losses."
    folder = some_rows(tmp_path_factory.mktemp('rows'), 8)
    plain = Recipe(
        name='eight', model={'source': 'tiny-base'},
        data={'source': str(folder), 'format': 'messages'}, method={'kind': 'full'},
        precision={'compute': 'float32'}, batch={'micro': 4, 'length': 64},
        optimizer={'steps': STEPS, 'learning_rate': 1e-3, 'warmup': 0.0, 'clip': 0.0})

    @functools.cache
    def run(strategy, kind='adamw_8bit'):
        ranks = 1 if strategy == 'none' else 2
        zero = ZERO if strategy.startswith('zero') else {}
        recipe = plain.changed({
            'sharding.strategy': strategy, 'optimizer.kind': kind, 'cluster.processes': ranks,
            'batch.accumulation': 2 // ranks, **zero})
        done = fine_tune(recipe, tmp_path_factory.mktemp('run') / 'run', 300, live=False)
        return [row['loss'] for row in done.metrics]
    return run


def apart(a, b): return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
def test_whole_tensors_have_the_blocks_of_one_process(losses):
    "The same sums in float32, and so the same scales and the same 8 bits."
    one, two = losses('none'), losses('ddp')
    print(f'ddp: {apart(one, two):.1e}')
    assert apart(one, two) < 1e-5
    assert one[-1] < one[0] - 1


@pytest.mark.parametrize('strategy', [slow_case('zero2'), slow_case('zero3')])
def test_flat_parts_have_other_blocks(losses, strategy, record_property):
    pytest.importorskip('deepspeed')
    one, exact, two = losses('none'), losses('none', 'adamw'), losses(strategy)
    exact_two = losses(strategy, 'adamw')
    rounding = max(apart(one, exact), apart(two, exact_two))
    record_property('rounding', rounding)
    print(f'{strategy}: {apart(one, two):.1e} from one process; 8 bits round by {rounding:.1e}')
    assert two[0] == pytest.approx(one[0], abs=1e-5), 'before a state was rounded'
    assert apart(two, one) <= 2 * rounding
    assert apart(two, exact_two) > 1e-5, '32 bits would be as near'
    assert two[-1] < two[0] - 1


def states(recipe, directory):
    "Train one step in this process; give the type of the state of each weight that trains."
    from llm_workbook.model.quantize import load_base
    from llm_workbook.training.fine_tune import check_recipe
    from llm_workbook.training.trainer import make_trainer
    base = load_base(recipe.model, recipe.method, recipe.precision, 'cpu')
    directory.mkdir()
    trainer = make_trainer(recipe, directory, check_recipe(recipe)[0], base)
    trainer.train()
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    optimizer = trainer.optimizer.optimizer
    return {names[parameter]: state['state1'].dtype for parameter, state in optimizer.state.items()}


def test_a_second_run_of_a_process_has_its_own_settings(tmp_path):
    "transformers gives an embedding 32 bits; the first adapter of the next run has its place."
    import torch
    full = small_recipe(tmp_path, 8, **{
        'cluster.processes': 1, 'sharding.strategy': 'none', 'optimizer.steps': 1,
        'optimizer.kind': 'adamw_8bit', 'intervals.saving': 0})
    adapted = full.changed({'method': {'kind': 'lora', 'rank': 64}})
    alone = states(adapted, tmp_path/'alone')
    first = states(full, tmp_path/'full')
    second = states(adapted, tmp_path/'second')
    assert first['model.embed_tokens.weight'] == torch.float32
    assert second == alone
    large = [kind for name, kind in second.items() if '.q_proj.' in name]  # 4,096 numbers each
    assert len(large) == 4 and set(large) == {torch.uint8}
