"""FSDP2 with offload on CPU ranks: the same losses, memory that is not pinned, and a head that TRL
reads on the device of the run."""
import pytest
from trouble import slow_case, some_rows

from llm_workbook.config.recipe import Recipe, planned_only, shrink
from llm_workbook.files import asset
from llm_workbook.parallel.backends import fsdp_env
from llm_workbook.parallel.ranks import notebook_ranks
from llm_workbook.training import rank_run
from llm_workbook.training.effective import explain_config
from llm_workbook.training.fine_tune import check_recipe, fine_tune, train_rank
from llm_workbook.training.trainer import sft_config
from llm_workbook.training.run_directory import RunFiles, read_metrics

AWAY = {'sharding.offload_parameters': 'cpu', 'sharding.offload_optimizer': 'cpu'}
PLAIN = shrink(Recipe.named('70b-2x24gb-qlora')).changed({
    'optimizer.steps': 2, 'batch.micro': 2, 'batch.accumulation': 2, 'intervals.saving': 0,
    'intervals.evaluation': 0})


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    "The recipe on a few rows: 2 steps of two passes."
    rows = some_rows(tmp_path_factory.mktemp('rows'), 24)
    return PLAIN.changed({'data.source': str(rows), 'data.format': 'messages'})


@pytest.fixture(scope='module')
def kept(plain, tmp_path_factory):
    "The losses of a run that offloads nothing."
    directory = tmp_path_factory.mktemp('kept')/'run'
    fine_tune(plain, directory, live=False)
    return losses(directory)


@pytest.fixture(scope='module')
def untied(plain, tmp_path_factory):
    "The recipe on a base whose head is no embedding, as that of every large Llama."
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder, source = tmp_path_factory.mktemp('base'), str(asset('tiny-base'))
    model = AutoModelForCausalLM.from_pretrained(source)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(1.01 * model.lm_head.weight.detach())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return plain.changed({'model.source': str(folder)})


def losses(directory): return [line['loss'] for line in read_metrics(RunFiles(directory).metrics)]


@pytest.mark.parametrize('loading', ['sharded', slow_case('every_rank')])
@pytest.mark.slow
def test_offload_without_pinned_memory_trains_the_same(plain, kept, tmp_path, loading):
    "However the base is loaded: to what is kept it makes no difference."
    recipe = plain.changed({'sharding.loading': loading})
    away = recipe.changed(AWAY | {'sharding.pin_memory': False})
    assert planned_only(recipe.changed(AWAY)) and not planned_only(away)
    run = fine_tune(away, tmp_path/'away', live=False)
    assert losses(tmp_path/'away') == kept
    settings = explain_config(run)
    for name, value in ('pin_memory', False), ('offload_parameters', 'cpu'):
        assert settings[f'sharding.{name}'].found == settings[f'sharding.{name}'].asked == value


def train(recipe, directory, rows, elsewhere):
    "Train on this rank, with a head that says it is elsewhere; give what the loss got."
    import trl.trainer.utils as trl_utils
    brought, weights, reads = [], [], []
    bring_head = rank_run.bring_head
    def note_bring(*args): brought.append(bring_head(*args))
    rank_run.bring_head = note_bring
    stand_in = rank_run.SimpleNamespace
    def note_read(**parts):
        reads.append(parts)
        return stand_in(**parts)
    rank_run.SimpleNamespace = note_read
    if elsewhere: rank_run._place = lambda head: 'elsewhere'
    original = trl_utils._ChunkedLogProbFunction
    class Noted:
        @staticmethod
        def apply(states, weight, *rest):
            weights.append(tuple(weight.shape))
            return original.apply(states, weight, *rest)
    trl_utils._ChunkedLogProbFunction = Noted
    train_rank(recipe, directory, rows, held=[])
    return brought, weights, len(reads)


@pytest.mark.parametrize('kind, away', [('qlora', True), slow_case('full', False)])
@pytest.mark.slow
def test_a_head_that_waits_elsewhere_is_brought_to_the_loss(tmp_path, untied, kind, away):
    recipe = untied.changed(AWAY | {'sharding.pin_memory': False, 'method.kind': kind})
    rows, _ = check_recipe(recipe)
    seen = []
    for elsewhere in False, True:
        directory = tmp_path/f'{elsewhere}'
        task = recipe, directory, rows, elsewhere
        seen += notebook_ranks(train, 2, task, 120, fsdp_env(recipe))
    assert [brought for brought, *_ in seen] == [[False]] * 2 + [[away]] * 2  # A norm gathers it
    passes = recipe.optimizer.steps * recipe.batch.accumulation
    assert [len(weights) for _, weights, _ in seen] == [passes] * 4
    assert [reads for *_, reads in seen] == [0] * 2 + [passes * away] * 2  # By TRL, and once each
    assert len({shape for _, weights, _ in seen for shape in weights}) == 1  # Whole
    assert losses(tmp_path/'True') == losses(tmp_path/'False')


def test_batches_on_gpus_are_padded_for_their_kernels():
    cuda = Recipe.named('70b-2x24gb-qlora').changed({'batch.micro': 2})
    for changes, multiple in (
            ({}, 8), ({'batch.length': 1004}, 4), ({'batch.length': 1001}, 1),
            ({'batch.micro': 1}, None)):  # One row needs no mask: padding would bring one
        assert sft_config(cuda.changed(changes), 'runs/none').pad_to_multiple_of == multiple
    assert sft_config(PLAIN.changed({'batch.micro': 2}), 'runs/none').pad_to_multiple_of is None


def test_padding_never_goes_beyond_the_length_of_a_batch():
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    for length in 1001, 1004, 1024:
        cuda = Recipe.named('70b-2x24gb-qlora')
        recipe = cuda.changed({'batch.micro': 2, 'batch.length': length})
        multiple = sft_config(recipe, 'runs/none').pad_to_multiple_of
        collate = DataCollatorForLanguageModeling(pad_token_id=0, pad_to_multiple_of=multiple)
        batch = collate([{'input_ids': [1] * length}, {'input_ids': [1] * 9}])
        assert batch['input_ids'].shape == (2, length)
        short = collate([{'input_ids': [1] * 5}, {'input_ids': [1] * 9}])
        assert short['input_ids'].shape[1] == {1: 9, 4: 12, 8: 16}[multiple]
        assert (short['labels'][:, 9:] == -100).all() and not short['attention_mask'][:, 9:].any()


ACTIVATIONS = {
    'cluster.processes': 1, 'sharding.strategy': 'none', 'sharding.loading': 'every_rank',
    'sharding.activation_checkpointing': 'full', 'sharding.offload_activations': 'cpu'}
FURTHER = {  # What goes with saved tensors on the host, and what does not: the fewest changes
    'one GPU': ({}, []),
    'DDP': ({'sharding.strategy': 'ddp', 'cluster.processes': 2}, []),
    'one pass': ({'batch.loss_head': 'one_pass'}, []),
    'all weights': ({'method.kind': 'full'}, []),
    'a CPU': ({'cluster.device': 'cpu'}, ['offloaded-activations-leave-a-gpu']),
    'FSDP2': (
        {'sharding.strategy': 'fsdp2', 'cluster.processes': 2},
        ['offloaded-activations-are-of-whole-weights']),
    'ZeRO-2': (
        {'sharding.strategy': 'zero2', 'cluster.processes': 2},
        ['offloaded-activations-are-of-whole-weights']),
    'no checkpointing': (
        {'sharding.activation_checkpointing': 'none'},
        ['offloaded-activations-are-inputs-of-layers']),
    'a selection': (
        {'sharding.activation_checkpointing': 'selective'},
        ['offloaded-activations-are-inputs-of-layers']),
    'reentrant': ({'sharding.reentrant': True}, ['offloaded-activations-are-not-reentrant']),
    'compiled': (
        {'model.kernels': 'compile', 'method.kind': 'lora'},
        ['offloaded-activations-have-plain-kernels']),
    'one pass over a head that trains': (
        {'batch.loss_head': 'one_pass', 'method.kind': 'full'},
        ['offloaded-activations-keep-no-head'])}


@pytest.mark.parametrize('changes, rules', FURTHER.values(), ids=FURTHER)
def test_saved_tensors_wait_on_the_host_of_a_gpu_alone(changes, rules):
    made = PLAIN.changed(ACTIVATIONS | {'cluster.device': 'cuda'} | changes)
    refused = [problem.reason.rpartition('[')[2].rstrip(']') for problem in planned_only(made)]
    assert refused == rules


def test_the_hook_of_trl_needs_an_accelerator():
    "If this fails, a CPU could do it: the rule of a CPU would be wrong."
    import torch
    from trl.models.activation_offloading import OffloadActivations
    if torch.accelerator.is_available(): pytest.skip('there is one here')
    # torch's build with CUDA has a name for the device, and then finds no driver
    with pytest.raises((AttributeError, RuntimeError), match="no attribute 'type'|CUDA"):
        OffloadActivations()


def test_a_shrunk_recipe_keeps_saved_tensors_where_they_are():
    from llm_workbook.config.recipe import shrinkage
    made = PLAIN.changed(ACTIVATIONS | {'cluster.device': 'cuda'})
    assert not planned_only(shrink(made))
    why = {field: reason for field, *_, reason in shrinkage(made)}
    assert why['sharding.offload_activations'] == 'on a CPU they are on the host already'
