"Relations hold for what is right; of the mistakes planted one by one, each breaks its relation."
import json
import os
from types import SimpleNamespace

import pytest
from trouble import assert_all_kept

from bench.lines.try_out import asked_for
from bench.shared.families import FAMILIES, add_tokenizer, family_fields
from llm_workbook.config.recipe import Recipe
from llm_workbook.model.quantize import load_base
from llm_workbook.release.invariants import check_invariants
from llm_workbook.release.relations import RELATIONS, make_specimen
from llm_workbook.release.small_case import (
    LeftOut, alone_recipe, distinct_rows, first_rows, small_recipe)

BETWEEN_RUNS = ['accumulation', 'ranks', 'resume', 'reported loss', 'schedule']


def recipe_for(source='tiny-base', **changes):
    rows = {'data.source': 'sample-conversations', 'batch.length': 512}
    named = Recipe.named('70b-2x24gb-qlora')
    return named.changed({'model.source': str(source)} | rows | changes)


def broken(found):
    "The relations that are broken, by name, and all that was said where one is not expected."
    return [one.name for one in found.problems]


def family_recipe(family, folder):
    "The recipe of two cards for a family at its published size: a configuration without weights."
    asked, source = asked_for(family, folder), folder/'source'
    fields = family_fields(family)
    if not fields.get('architectures'):
        fields['architectures'] = json.loads(
            (folder/'bases'/family.replace(' ', '-')/'config.json').read_text())['architectures']
    source.mkdir()
    (source/'config.json').write_text(json.dumps(fields, default=str))
    add_tokenizer(source)
    return asked.changed({'model.source': str(source)})


# One model in one process

def specimen_of(asked, folder):
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from llm_workbook.model.miniature import miniature
    for kind in AcceleratorState, GradientState, PartialState: kind._shared_state.clear()
    asked = asked.changed({'precision.compute': 'float32', 'method.storage': 'float32'})
    base = miniature(asked.model.source, folder/'base')
    rows = distinct_rows(first_rows(asked, base), 12)
    return make_specimen(alone_recipe(small_recipe(asked, base, rows)), folder/'specimen')


@pytest.fixture(scope='module')
def specimen(tmp_path_factory):
    return specimen_of(recipe_for(**{'method.kind': 'lora'}), tmp_path_factory.mktemp('llama'))


@pytest.fixture(scope='module')
def gemma(tmp_path_factory):
    folder = tmp_path_factory.mktemp('gemma')
    asked = family_recipe('Gemma 2', folder)
    return specimen_of(asked.changed({'method.kind': 'lora'}), folder/'case')


def found_in(specimen):
    "The relations of one model that are broken."
    names = []
    for name, relation in RELATIONS.items():
        try: holds = relation(specimen).passed
        except LeftOut: continue
        if not holds: names.append(name)
    return names


def test_a_llama_keeps_all_relations(specimen):
    assert found_in(specimen) == []


def test_a_gemma_2_keeps_all_relations(gemma):
    assert found_in(gemma) == []


def collating(monkeypatch, change):
    "Let TRL's collator change a batch before it is trained on."
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as Collator
    right = Collator.torch_call

    def wrong(self, examples):
        batch = right(self, examples)
        change(batch, examples)
        return batch

    monkeypatch.setattr(Collator, 'torch_call', wrong)


def test_an_end_token_that_is_taken_for_padding_is_found(monkeypatch, specimen):
    end = specimen.tokenizer.eos_token_id

    def as_padding(batch, examples): batch['labels'][batch['labels'] == end] = -100

    collating(monkeypatch, as_padding)
    assert found_in(specimen)[0] == 'whole answers'
    assert 'no question' not in found_in(specimen)


def test_a_user_that_trains_is_found(monkeypatch, specimen):
    def all_train(batch, examples):
        seen = batch['attention_mask'].bool()
        batch['labels'] = batch['input_ids'].where(seen, -100)

    collating(monkeypatch, all_train)
    assert 'no question' in found_in(specimen)


@pytest.mark.parametrize('places', [1, -1])
def test_a_mask_that_is_moved_by_one_is_found(places, monkeypatch, specimen):
    def moved(batch, examples):
        mask = (batch['labels'] != -100).roll(places, -1) & batch['attention_mask'].bool()
        batch['labels'] = batch['input_ids'].where(mask, -100)

    collating(monkeypatch, moved)
    assert found_in(specimen)[0] == 'whole answers'


def test_fill_that_is_counted_is_found(monkeypatch, specimen):
    def counted(batch, examples):
        fill = batch['attention_mask'] == 0
        batch['labels'] = batch['labels'].where(~fill, specimen.tokenizer.pad_token_id)

    collating(monkeypatch, counted)
    assert found_in(specimen) == ['padding']


def test_a_loss_that_is_a_mean_of_rows_is_found(monkeypatch, specimen):
    from trl import SFTTrainer

    def by_rows(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs, use_cache=False, fused_lm_head=True)
        rows = -output.log_probs.sum(-1) / output.label_mask.sum(-1)
        return rows.mean()

    monkeypatch.setattr(SFTTrainer, 'compute_loss', by_rows)
    assert found_in(specimen) == ['padding', 'loss head']


def test_fill_on_the_left_that_is_looked_at_is_found(monkeypatch, specimen):
    import transformers.models.llama.modeling_llama as llama
    right = llama.create_causal_mask

    def unmasked(*args, attention_mask=None, **options):
        return right(*args, attention_mask=None, **options | {'position_ids': None})

    monkeypatch.setattr(llama, 'create_causal_mask', unmasked)
    assert 'padding' in found_in(specimen)


def test_a_gradient_that_is_no_number_is_found(monkeypatch, specimen):
    from llm_workbook.release import relations
    right = relations.gradients

    def lost_where_filled(specimen, batches, loss_of=None):
        loss, gradient = right(specimen, batches, loss_of)
        if len(batches) == 1 and len(batches[0]['input_ids']) > 1: gradient[3] = float('nan')
        return loss, gradient

    monkeypatch.setattr(relations, 'gradients', lost_where_filled)
    assert found_in(specimen) == ['padding', 'checkpointing']


def test_a_collator_that_counts_on_from_example_to_example_is_found(monkeypatch, specimen):
    from llm_workbook.training import packed_rows
    right = packed_rows._filled_up

    def counting_on(rows, *options):
        columns = right(rows, *options)
        return columns | {'position_ids': [[*range(len(row))] for row in columns['position_ids']]}

    monkeypatch.setattr(packed_rows, '_filled_up', counting_on)
    assert found_in(specimen) == ['packing']


def test_a_leak_from_one_example_into_the_next_is_found(monkeypatch, specimen):
    import transformers.masking_utils as masks
    monkeypatch.setattr(masks, 'find_packed_sequence_indices', lambda position_ids: None)
    assert found_in(specimen) == ['packing']


def test_positions_that_go_on_in_a_packed_row_are_found(monkeypatch, specimen):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    right = LlamaRotaryEmbedding.forward

    def counting(self, x, position_ids):
        import torch
        if position_ids.shape[0] == 1 and (position_ids.diff() < 0).any():
            position_ids = torch.arange(position_ids.shape[1])[None] * 2
        return right(self, x, position_ids)

    monkeypatch.setattr(LlamaRotaryEmbedding, 'forward', counting)
    assert found_in(specimen) == ['packing']


def test_a_cache_flag_that_changes_the_forward_pass_is_found(monkeypatch, specimen):
    from transformers.models.llama.modeling_llama import LlamaAttention
    right = LlamaAttention.forward

    def forward(self, hidden_states, *args, **options):
        caches = options.get('past_key_values'), options.get('cache')  # Since transformers 5.24
        if caches != (None, None) and self.layer_idx: hidden_states = hidden_states * 1.01
        return right(self, hidden_states, *args, **options)

    monkeypatch.setattr(LlamaAttention, 'forward', forward)
    assert found_in(specimen) == ['cache']


def test_dropout_that_is_drawn_anew_when_a_layer_runs_again_is_found(monkeypatch, specimen):
    import torch.utils.checkpoint as torch_page
    right = torch_page.checkpoint

    def forgetful(*args, **options): return right(*args, **options | {'preserve_rng_state': False})

    for place in ('torch.utils.checkpoint.checkpoint', 'transformers.modeling_utils.checkpoint'):
        monkeypatch.setattr(place, forgetful)
    assert found_in(specimen) == ['checkpointing']


def test_a_layer_that_runs_again_in_another_way_is_found(monkeypatch, specimen):
    from transformers.models.llama.modeling_llama import LlamaMLP
    import torch
    right = LlamaMLP.forward

    def forward(self, x):
        again = torch._C._current_graph_task_id() != -1  # Inside of a backward pass
        return right(self, x * 1.01 if again else x)

    monkeypatch.setattr(LlamaMLP, 'forward', forward)
    assert found_in(specimen) == ['checkpointing']


def test_a_softcap_that_the_head_forgets_is_found(monkeypatch, gemma):
    from trl.trainer.utils import _ChunkedLogProbFunction as Head
    right = Head.apply
    assert gemma.model.config.get_text_config().final_logit_softcapping

    def uncapped(*args): return right(*args[:6], None, *args[7:])

    monkeypatch.setattr(Head, 'apply', uncapped)
    assert found_in(gemma) == ['loss head']


def test_an_adapter_that_is_bypassed_is_found(monkeypatch, specimen):
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self, x):
        down = getattr(self.down_proj, 'base_layer', self.down_proj)  # As a fused kernel takes it
        return down(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    monkeypatch.setattr(LlamaMLP, 'forward', forward)
    assert found_in(specimen) == ['reach', 'merge']


def test_an_adapter_that_is_left_out_is_found(monkeypatch, tmp_path):
    from peft.tuners.lora import LoraModel
    right = LoraModel._create_and_replace

    def all_but_one(*args, current_key, **options):
        if current_key.endswith('layers.1.mlp.up_proj'): return
        right(*args, current_key=current_key, **options)

    monkeypatch.setattr(LoraModel, '_create_and_replace', all_but_one)
    found = specimen_of(recipe_for(**{'method.kind': 'lora'}), tmp_path)
    assert found_in(found) == ['adapters']
    assert 'layers.1.mlp.up_proj has none' in RELATIONS['adapters'](found).compared


def test_a_merge_with_a_wrong_scale_is_found(monkeypatch, specimen):
    import llm_workbook.release.merge as merge_page
    right = merge_page._pairs

    def doubled(adapters):
        pairs, config = right(adapters)
        wrong = {name: pair._replace(scale=2 * pair.scale) for name, pair in pairs.items()}
        return wrong, config

    monkeypatch.setattr(merge_page, '_pairs', doubled)
    assert found_in(specimen) == ['merge']


def test_all_that_a_packed_recipe_takes_keeps_all_relations(tmp_path):
    changes = {
        'method.kind': 'lora', 'method.scaling': 'rslora',
        'method.dora': True, 'method.dropout': 0.0,
        'model.attention': 'segments', 'batch.loss_head': 'one_pass'}
    assert found_in(specimen_of(recipe_for(**changes), tmp_path)) == []


# Runs

def checked(relations=None, **changes):
    return check_invariants(recipe_for(**changes), None, relations)


WHOLE = {'sharding.loading': 'every_rank', 'sharding.offload_parameters': 'none',
         'sharding.offload_optimizer': 'none'}
# Of two ranks the cheapest, for mistakes that a strategy has no part in
DDP = WHOLE | {'method.kind': 'lora', 'sharding.strategy': 'ddp'}


# QLoRA under FSDP2 is the recipe of the page of `check_invariants`
@pytest.mark.slow
@pytest.mark.parametrize('changes', [
    DDP, {'method.kind': 'full', 'sharding.activation_checkpointing': 'selective'},
    WHOLE | {'sharding.strategy': 'none', 'cluster.processes': 1}],
    ids=['lora-ddp', 'full-selective', 'alone'])
def test_a_recipe_keeps_all_relations(changes):
    found = checked(**changes)
    assert_all_kept(found, changes)


@pytest.mark.slow
@pytest.mark.parametrize('changes', [
    WHOLE | {'method.kind': 'full', 'sharding.strategy': 'zero3'},
    WHOLE | {'method.kind': 'lora', 'sharding.strategy': 'zero1'}],
    ids=['zero3-full', 'zero1-lora'])
def test_ranks_agree_under_a_strategy(changes):
    found = checked(['ranks', 'reported loss', 'schedule'], **changes)
    assert [one.passed for one in found.relations] == [True] * 4, found
    assert 'in groups of 2' not in found.relations[1].what


def test_a_recipe_in_groups_has_a_run_in_groups(tmp_path):
    from llm_workbook.release.invariants import _recipes
    asked = recipe_for(**{'sharding.group': 2, 'cluster.processes': 4})
    small = small_recipe(asked, tmp_path/'base', [{'text': 'a'}] * 6)
    groups = _recipes(small, groups=True)['groups']
    assert (groups.cluster.ranks, groups.sharding.group) == (6, 2)
    assert groups.batch.accumulation * groups.batch.micro == 1
    assert 'groups' not in _recipes(small, groups=False)


def test_what_a_norm_in_float32_loses_is_measured():
    import torch
    from llm_workbook.release.invariants import _lost_in_norm
    layer = torch.nn.Linear(1000, 1000, bias=False)
    layer.weight.grad = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))
    exact = layer.weight.grad.double().norm()
    assert _lost_in_norm(layer) == pytest.approx(
        abs(float(layer.weight.grad.norm().double() / exact - 1)), rel=1e-2, abs=1e-8)


@pytest.mark.parametrize('stage', [2, 3])
def test_deepspeed_takes_norms_as_the_tolerance_for_zero_says(monkeypatch, stage):
    "Its own code, on one rank: norms of tensors in float64; under ZeRO-2 their sum in float32."
    import torch
    from deepspeed.runtime.zero import stage3, stage_1_and_2
    from llm_workbook.release.invariants import _SUM_ERROR
    module, kind = {2: (stage_1_and_2, 'DeepSpeedZeroOptimizer'),
                    3: (stage3, 'DeepSpeedZeroOptimizer_Stage3')}[stage]
    monkeypatch.setattr(module.dist, 'all_reduce', lambda *given, **how: None)
    optimizer = SimpleNamespace(
        model_parallel_rank=0, dp_process_group=None, device='cpu',
        _model_parallel_all_reduce=lambda **how: None, _assert_same_partition_group=lambda _: None,
        _get_param_partition_group=lambda _: None, _autoep_expert_parallel_group=lambda _: None,
        _grad_norm_counts_every_rank=lambda *_: True)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(300_000, generator=generator) for _ in range(20)]
    exact = torch.cat(parts).double().norm()
    found = getattr(module, kind).get_grad_norm_direct(optimizer, parts, parts)
    error = abs(float(found.double() / exact - 1))
    in_float32 = torch.stack([part.norm() for part in parts]).norm()
    assert abs(float(in_float32.double() / exact - 1)) > 1e-6  # What torch loses
    assert found.dtype == (torch.float32 if stage == 2 else torch.float64)
    assert 0 < error < _SUM_ERROR if stage == 2 else error < 1e-12


@pytest.mark.slow
def test_a_classifier_keeps_what_can_be_asked_of_it():
    named = Recipe.named('reviews-qlora').changed({
        'model.source': 'tiny-base', 'model.head': 'classification'})
    found = check_invariants(named, relations=['ranks', 'accumulation', 'reported loss'])
    assert [one.passed for one in found.relations] == [True, True, True, None], found
    assert 'a loss for each row' in found.relations[-1].what


def test_tokens_are_counted_whatever_the_class_of_a_model_says(monkeypatch, specimen):
    "transformers gives no count to a class that says so, as Gemma 4 and Qwen 3 VL with towers."
    from llm_workbook.training.trainer import make_trainer
    from transformers import LlamaForCausalLM
    monkeypatch.setattr(LlamaForCausalLM, 'accepts_loss_kwargs', False, raising=False)
    base = load_base(specimen.recipe.model.source, specimen.recipe.method, device='cpu')
    trainer = make_trainer(specimen.recipe, specimen.folder, specimen.rows, base)
    labels = [{'labels': specimen.batch(specimen.examples)['labels']}]
    assert int(trainer._get_num_items_in_batch(labels, 'cpu')) == specimen.items


@pytest.mark.slow
def test_a_loss_that_is_divided_by_micro_batches_is_found(monkeypatch):
    from transformers import Trainer
    monkeypatch.setattr(Trainer, '_get_num_items_in_batch', lambda self, batches, device: None)
    found = checked(['accumulation', 'resume'])
    assert broken(found) == ['accumulation'], found


@pytest.mark.slow
def test_a_loss_that_is_divided_once_more_is_found(monkeypatch):
    from trl import SFTTrainer
    right = SFTTrainer.compute_loss

    def divided(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = right(self, model, inputs, return_outputs, num_items_in_batch)
        return loss / self.args.gradient_accumulation_steps

    monkeypatch.setattr(SFTTrainer, 'compute_loss', divided)
    found = checked(['accumulation', 'resume'])
    assert broken(found) == ['accumulation'], found


@pytest.mark.slow
def test_ranks_that_train_the_same_rows_are_found(monkeypatch, capsys):
    from accelerate.data_loader import BatchSamplerShard
    right = BatchSamplerShard.__init__

    def first(self, sampler, num_processes=1, process_index=0, **options):
        right(self, sampler, num_processes, 0, **options)

    monkeypatch.setattr(BatchSamplerShard, '__init__', first)
    found = checked(['accumulation', 'ranks', 'resume'], **DDP)
    assert 'ranks' in broken(found) and not {'accumulation', 'resume'} & {*broken(found)}, found
    bar = capsys.readouterr().err
    assert all(f'/{len(found.relations)}' in bar and now in bar
               for now in ('miniature', 'one process', 'two ranks', 'three ranks'))


@pytest.mark.slow
def test_gradients_that_are_averaged_once_too_often_are_found(monkeypatch):
    from trl import SFTTrainer
    right = SFTTrainer.compute_loss

    def averaged(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = right(self, model, inputs, return_outputs, num_items_in_batch)
        return loss / self.accelerator.num_processes

    monkeypatch.setattr(SFTTrainer, 'compute_loss', averaged)
    found = checked(['accumulation', 'ranks', 'schedule'], **DDP)
    assert broken(found) == ['ranks'], found


@pytest.mark.slow
def test_the_loss_of_rank_0_alone_is_found(monkeypatch):
    monkeypatch.setattr('transformers.trainer.nested_gather', lambda tensors, *args: tensors)
    found = checked(['accumulation', 'loss head', 'reported loss'], **DDP)
    assert broken(found) == ['reported loss'], found


@pytest.mark.slow
@pytest.mark.parametrize('method', ['qlora', 'full'])
def test_a_resume_that_passes_over_a_batch_is_found(method, monkeypatch):
    import accelerate
    import transformers.trainer as trainer_page
    right = accelerate.skip_first_batches

    def one_too_many(loader, num_batches=0): return right(loader, num_batches + 1)

    monkeypatch.setattr(trainer_page, 'skip_first_batches', one_too_many)
    found = checked(['cache', 'resume'], **{'method.kind': method})
    assert broken(found) == ['resume'], found


@pytest.mark.slow
def test_a_resume_that_forgets_the_moments_is_found(monkeypatch):
    import llm_workbook.training.resume as resume_page
    right = resume_page.load_step

    def forgetful(run, checkpoint, trained):
        facts = right(run, checkpoint, trained)
        trained[1].state.clear()
        return facts

    monkeypatch.setattr(resume_page, 'load_step', forgetful)
    found = checked(['cache', 'resume'])
    assert broken(found) == ['resume'], found


@pytest.mark.slow
def test_a_schedule_that_is_stepped_for_every_rank_is_found(monkeypatch):
    from torch.optim.lr_scheduler import LambdaLR
    right = LambdaLR.step

    def by_ranks(self, *args):
        ranks = int(os.environ.get('WORLD_SIZE', 1))
        for _ in range(ranks if self.last_epoch >= 0 else 1): right(self, *args)

    monkeypatch.setattr(LambdaLR, 'step', by_ranks)
    found = checked(['cache', 'resume', 'schedule'], **DDP)
    assert broken(found) == ['schedule'], found


@pytest.mark.slow
def test_an_adapter_that_is_bypassed_ends_nothing_else(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self, x):
        down = getattr(self.down_proj, 'base_layer', self.down_proj)
        return down(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    monkeypatch.setattr(LlamaMLP, 'forward', forward)
    found = checked()
    assert 'reach' in broken(found) and not {*broken(found)} & {*BETWEEN_RUNS}, found
    assert found.relations[-1].what == 'not reached: it needs reach'


@pytest.mark.slow
@pytest.mark.parametrize('packs', [True, False])
def test_a_leak_counts_where_a_recipe_packs(packs, monkeypatch):
    import transformers.masking_utils as masks
    monkeypatch.setattr(masks, 'find_packed_sequence_indices', lambda position_ids: None)
    found = checked(['packing', 'cache'], **{'batch.packing': packs})
    assert broken(found) == (['packing'] if packs else []), found
    remark = next(one for one in found.relations if one.name == 'packing')
    assert packs or 'packed rows would leak' in remark.what


# Families

NO_QLORA = 'Gemma 3n', 'GPT-2', 'Falcon'  # Refused before a weight is loaded

# A check takes half a minute: FAMILIES=all runs them all, which takes half an hour
FEW = 'Gemma 3', 'GLM 4.5'  # And the Llama above
SWEPT = FAMILIES if os.environ.get('FAMILIES') == 'all' else FEW
IN_GROUPS = {'Gemma 3': {'cluster.processes': 4, 'sharding.group': 2}}


@pytest.mark.slow
@pytest.mark.parametrize('family', SWEPT)
def test_a_family_gives_no_false_alarm(family, tmp_path):
    asked = family_recipe(family, tmp_path).changed(IN_GROUPS.get(family, {}))
    if family in NO_QLORA: asked = asked.changed({'method.kind': 'lora'})
    found = check_invariants(asked)
    assert found.passed, found
    what = {one.name: one.what for one in found.relations}
    assert ('in groups of 2' in what['ranks']) == (family in IN_GROUPS)


# What it refuses

def test_too_few_rows_are_refused_with_what_is_needed(tmp_path):
    rows = '{"prompt": "Hi", "completion": "Ho"}\n' * 40
    (tmp_path/'rows.jsonl').write_text(rows)
    asked = recipe_for(**{'data.source': str(tmp_path/'rows.jsonl'), 'data.format': 'auto',
                          'data.test_share': 0.0, 'intervals.evaluation': 0})
    found = check_invariants(asked, relations=['cache'])
    assert [one.passed for one in found.relations] == [False, None]
    assert '1 of the first 40 rows differ, and 6 are needed' in found.relations[0].what
