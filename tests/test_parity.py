"""What two and three ranks train is what one process trains, and what they save is what they have trained.

The process that is compared with takes the same micro-batches, by accumulation: 6 of 2 rows make every step.
"""
import functools
import json
import os

import pytest
import torch
import torch.distributed as dist

from llm_workbook import training
from llm_workbook.adapters import check_targets, load_adapters, moved
from llm_workbook.quant import load_base
from llm_workbook.recipe import Recipe, asset

STEPS, PARTS = 20, 6
IDS = torch.arange(2, 98).reshape(4, 24)  # any tokens will do
RECIPES = {
    'full': {'method.kind': 'full', 'precision.compute': 'float32', 'optimizer.learning_rate': 1e-3, 'optimizer.clip': 0.5},
    'qlora': {'method.kind': 'qlora', 'precision.compute': 'bfloat16', 'optimizer.learning_rate': 3e-3, 'optimizer.clip': 0.1},
}
LOSS = {'full': 1e-5, 'qlora': 2e-3}  # relative, at every step
NORM = {'full': 1e-4, 'qlora': 1e-2}  # the same; the norm of one of two ranks alone would be off by about 3e-1
pairs = pytest.mark.parametrize('kind, ranks', [(kind, ranks) for kind in RECIPES for ranks in (2, 3)])


def whole(tensor): return tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor


def observe(patch, folder):
    "Let every rank write down the norm of each gradient as it is applied, and what the trained model answers and holds."
    from transformers import TrainerCallback
    make, save, norms = training._trainer, training._save, []

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            norms.append(sum(whole(p.grad).double().square().sum() for p in model.parameters() if p.requires_grad).sqrt().item())

    def make_observed(*args):
        trainer = make(*args)
        trainer.add_callback(Norms())
        return trainer

    def save_observed(trainer, recipe, directory):
        with torch.no_grad(): logits = trainer.model.eval()(input_ids=IDS).logits
        weights = {n: whole(p).detach().clone() for n, p in trainer.model.named_parameters()} if recipe.method.kind == 'full' else {}
        torch.save({'norms': norms, 'logits': logits, 'weights': weights}, folder/f'seen.{os.environ["RANK"]}')
        return save(trainer, recipe, directory)
    patch.setattr(training, '_trainer', make_observed)
    patch.setattr(training, '_save', save_observed)


@pytest.fixture(scope='module')
def fine_tuned(tmp_path_factory):
    "A function that fine-tunes for 20 steps on some ranks, once: gives the run and what each rank saw."
    folder = tmp_path_factory.mktemp('parity')
    for split, many in ('train', 120), ('test', 10):  # 120 rows are ten steps: the second epoch counts too
        lines = (asset('sample-conversations')/f'{split}.jsonl').read_text().splitlines(keepends=True)
        (folder/f'{split}.jsonl').write_text(''.join(lines[:many]))
    plain = Recipe(name='parity', model={'source': 'tiny-base'}, data={'source': str(folder), 'format': 'messages'},
                   batch={'micro': 2, 'length': 64}, optimizer={'steps': STEPS, 'weight_decay': 0.01})

    @functools.cache
    def run(kind, ranks):
        recipe = plain.changed(RECIPES[kind] | {
            'cluster.processes': ranks, 'sharding.strategy': 'none' if ranks == 1 else 'fsdp2', 'batch.accumulation': PARTS // ranks})
        here = tmp_path_factory.mktemp(f'{kind}-{ranks}')
        with pytest.MonkeyPatch.context() as patch:
            observe(patch, here)
            done = training.fine_tune(recipe, here/'run', timeout_s=300, live=False)
        return done, [torch.load(here/f'seen.{rank}') for rank in range(ranks)]
    return run


def deviation(found, expected):
    "The largest relative difference."
    assert len(found) == len(expected) == STEPS
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected))


@pairs
def test_every_loss_is_that_of_one_process(fine_tuned, kind, ranks, record_property):
    one, many = ([row['loss'] for row in fine_tuned(kind, n)[0].metrics] for n in (1, ranks))
    worst = deviation(many, one)
    record_property('relative_loss', worst)
    print(f'{kind}, {ranks} ranks: loss {one[0]:.4f} to {one[-1]:.4f}, largest relative difference {worst:.1e}')
    assert worst <= LOSS[kind]
    assert one[-1] < one[0] - 0.1, 'a model that learns nothing would agree as well'


@pairs
def test_the_clip_norm_is_global(fine_tuned, kind, ranks, record_property):
    (one, _), (many, seen) = fine_tuned(kind, 1), fine_tuned(kind, ranks)
    before = [[row['grad_norm'] for row in run.metrics] for run in (many, one)]
    worst, clip = deviation(*before), one.recipe.optimizer.clip
    record_property('relative_norm', worst)
    print(f'{kind}, {ranks} ranks: norms {min(before[1]):.3f} to {max(before[1]):.3f}, clip {clip}, '
          f'largest relative difference {worst:.1e}')
    assert worst <= NORM[kind]
    assert min(before[1]) > 1.2 * clip, 'every step must be clipped, or this shows nothing'
    for rank in seen: assert rank['norms'] == pytest.approx([clip] * STEPS, rel=1e-4)


@pairs
def test_every_rank_holds_its_share(fine_tuned, kind, ranks):
    shards = [rank['shards'] for rank in fine_tuned(kind, ranks)[0].ranks]
    assert [s.strategy for s in shards] == ['fsdp2'] * ranks and all(s.here_b <= s.limit_b < s.total_b for s in shards)
    assert sum(s.here_b for s in shards) == shards[0].total_b
    uneven = [row for row in shards[0].rows if row[2][0] % ranks]
    assert bool(uneven) == (ranks == 3)


@pytest.mark.parametrize('ranks', [1, 2, 3])
def test_the_payload_of_every_rank_is_the_base(fine_tuned, ranks):
    from llm_workbook.quant import fingerprint
    run, _ = fine_tuned('qlora', ranks)
    base = fingerprint(load_base('tiny-base', run.recipe.method, run.recipe.precision, 'cpu')).digest
    assert [rank['payload'] for rank in run.ranks] == [base] * ranks


@pytest.mark.parametrize('ranks', [1, 2, 3])
def test_saved_adapters_give_the_logits_of_the_trained_model(fine_tuned, ranks, record_property):
    run, seen = fine_tuned('qlora', ranks)
    base = load_base('tiny-base', run.recipe.method, run.recipe.precision, 'cpu')
    with torch.no_grad():
        before = base(input_ids=IDS).logits.float()
        after = load_adapters(base, run.saved)(input_ids=IDS).logits.float()
    worst = max((after - rank['logits'].float()).abs().max().item() for rank in seen)
    learned = (after - before).abs().max().item()
    record_property('logits', worst)
    print(f'qlora, {ranks} ranks: logits differ by {worst:.1e} at most, training moved them by {learned:.1f}')
    assert worst <= 2**-7 * after.abs().max().item()
    assert learned > 1


@pytest.mark.parametrize('ranks', [2, 3])
def test_the_adapter_of_every_target_moved(fine_tuned, ranks):
    run, _ = fine_tuned('qlora', ranks)
    norms = moved(run.saved)
    assert sorted(norms) == sorted(check_targets('tiny-base', 'all-linear')) and len(norms) == 28
    assert all(rank['saved'] == norms for rank in run.ranks)
    assert json.loads((run.saved/'adapter_config.json').read_text())['base_model_name_or_path'] == 'tiny-base'


@pytest.mark.parametrize('ranks', [2, 3])
def test_a_saved_model_loads_in_plain_transformers(fine_tuned, ranks):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    run, seen = fine_tuned('full', ranks)
    model, base = (AutoModelForCausalLM.from_pretrained(path, dtype='float32') for path in (run.saved, asset('tiny-base')))
    weights, before = dict(model.named_parameters()), dict(base.named_parameters())
    assert model.config.dtype == torch.float32 and 'chat_template' in vars(AutoTokenizer.from_pretrained(run.saved))
    for rank in seen:
        assert weights.keys() == rank['weights'].keys()
        assert all(torch.equal(weights[n], w) and not torch.equal(before[n], w) for n, w in rank['weights'].items())
    with torch.no_grad(): torch.testing.assert_close(model(input_ids=IDS).logits, seen[0]['logits'], rtol=1e-4, atol=1e-4)
