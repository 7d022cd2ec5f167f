"""A card is written from the run: of a mix, of a classifier, of a run that an earlier call has
finished; and it names no folder of this machine."""
import json
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard
from trouble import fine_tune, small_recipe

from llm_workbook.release.model_card import model_card
from llm_workbook.report import reconcile
from llm_workbook.plan.estimate import estimate
from llm_workbook.rehearsal.step import rehearse


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp('secret-project')
    recipe = small_recipe(folder, **{'optimizer.steps': 4, 'intervals.evaluation': 2})
    pairs = [{'prompt': f'What follows {n}?', 'completion': str(n + 1)} for n in range(10)]
    for name in 'ab':
        (folder/name).mkdir()
        rows = [pair | {'prompt': f'{name}: {pair["prompt"]}'} for pair in pairs]
        (folder/name/'train.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    mix = [
        {'source': str(folder/name/'train.jsonl'), 'weight': n} for n, name in enumerate('ab', 1)]
    changes = {'data.source': None, 'data.mix': mix, 'data.format': 'auto', 'data.test_share': 0.2}
    return fine_tune(recipe.changed(changes), folder/'run')


def test_sources_are_told_apart_and_no_folder_is_named(run):
    card = model_card(run)
    assert 'secret-project' not in card and str(run.directory) not in card
    assert '| 1-train.jsonl | 8 | 33.3% |' in card and '| 2-train.jsonl | 8 | 66.7% |' in card
    assert card.count('source: 1-train.jsonl') == 1  # In the recipe at its end


def test_every_evaluation_is_a_row_with_its_perplexity(run):
    card = model_card(run)
    assert '| step | loss | perplexity | rows | tokens |' in card
    for line in run.evaluations:
        assert f'| {line["step"]} | {line["loss"]:.4g} | {line["perplexity"]:.4g} |' in card


def test_the_hub_reads_its_head(run):
    head = ModelCard(model_card(run, license='apache-2.0')).data
    assert (head.library_name, head.license, head.pipeline_tag) == (
        'transformers', 'apache-2.0', 'text-generation')
    assert head.base_model is None and head.datasets is None  # Both lie on this disk
    assert ModelCard(model_card(run)).data.license is None


def test_a_report_says_what_was_planned_and_what_was_measured(run):
    report = reconcile(estimate(run.recipe), rehearse(run.recipe), run)
    card = model_card(run, report=report)
    for row in report.part('run'): assert f'| {row.item} |' in card
    assert '| planned | rehearsed | measured |' in card


def test_a_run_that_was_finished_before_has_no_memory_of_its_ranks(run):
    card = model_card(replace(run, ranks=[]))
    assert 'measured, rank' not in card and 'measured, all steps' in card


def test_the_lines_of_a_classifier_load_it_with_plain_peft(tmp_path):
    import torch
    from llm_workbook.model.architecture import load_tokenizer
    from llm_workbook.training.classifier import reload_classifier
    recipe = small_recipe(tmp_path, **{
        'model.head': 'classification', 'model.classes': 3, 'method.kind': 'lora',
        'cluster.processes': 1, 'sharding.strategy': 'none', 'intervals.saving': 0,
        'batch.length': 128, 'optimizer.steps': 1, 'data.source': 'sample-reviews',
        'data.format': 'classification', 'data.text_column': 'text', 'data.label_column': 'stars',
        'data.labels': {1: 'bad', 2: 'bad', 3: 'fair', 4: 'good', 5: 'good'}})
    run = fine_tune(recipe, tmp_path/'run')
    [_, code, *_] = model_card(run).split('## Use')[1].replace('```python', '```').split('```')
    scope = {}
    exec(code.replace("'adapters'", repr(str(run.saved))), scope)
    model = scope['model'].eval()
    assert model.config.id2label == {0: 'bad', 1: 'fair', 2: 'good'}
    texts = load_tokenizer(run.saved)(['So good.', 'Bad'], return_tensors='pt', padding=True)
    given = {name: texts[name] for name in ('input_ids', 'attention_mask')}
    with torch.no_grad(): expected = reload_classifier(recipe, run.directory)(**given).logits
    assert torch.allclose(model(**given).logits, expected, atol=1e-6)
