"""Train a model with a tokenizer that is not ours on rows that are not ours, on two ranks.

The configuration is Qwen 3's in miniature, with random weights; tokenizer and chat template are as
published. Instructions train its words, and reviews a new head.
"""
import shutil
import tempfile
from math import log
from pathlib import Path

from bench.record import Skip, record
from bench.shared.public_data import folder

VOCABULARY = 151_936  # Qwen 3's, with the places that no token uses
STEPS = {'optimizer.steps': 24, 'intervals.evaluation': 8}
INSTRUCTIONS = {
    'data.test_share': 0.02, 'batch.length': 1024, 'batch.micro': 1, 'batch.accumulation': 4}
REVIEWS = {
    'data.text_column': 0, 'data.label_column': 1, 'data.labels': {0: 'negative', 1: 'positive'},
    'data.test_share': 0.1, 'batch.length': 64, 'batch.micro': 8}


def published(place: Path) -> Path:
    "Find Qwen 3's tokenizer files beside the rows."
    tokenizer = place/'tokenizers/qwen3'
    if not tokenizer.is_dir(): raise Skip(f'no {tokenizer.relative_to(place)} beside the rows')
    return tokenizer


def small_qwen3(tokenizer: Path, place: Path) -> Path:
    "Write Qwen 3 in miniature, with the published tokenizer and its whole vocabulary."
    from llm_workbook.model.miniature import miniature
    from transformers import AutoConfig
    source = place/'published'
    shutil.copytree(tokenizer, source)
    AutoConfig.for_model('qwen3', vocab_size=VOCABULARY).save_pretrained(source)
    return miniature(source, place/'qwen3')


def instruction_recipe(model: Path, rows: Path) -> 'Recipe':
    "QLoRA under FSDP2 on two ranks, for a file of instructions."
    from llm_workbook import Recipe, shrink
    return shrink(Recipe.named('70b-2x24gb-qlora')).changed(
        {'model.source': str(model), 'data': {'source': str(rows)}} | INSTRUCTIONS | STEPS)


def review_recipe(model: Path, rows: Path) -> 'Recipe':
    "QLoRA under ZeRO-3 on two ranks, with a new head for the classes of a table of reviews."
    from llm_workbook import Recipe, shrink
    return shrink(Recipe.named('70b-2x4-h100-zero3-qlora-classifier')).changed(
        {'model.source': str(model), 'data.source': str(rows)} | REVIEWS | STEPS)


def followed(recipe: 'Recipe', place: Path) -> dict:
    "Train; give the held-out losses in order."
    from llm_workbook import fine_tune
    run = fine_tune(recipe, place, timeout_s=420, live=False)
    return {'rows_held_out': run.evaluations[-1]['rows'],
            'held_out': [round(line['loss'], 4) for line in run.evaluations],
            'steps': [line['step'] for line in run.evaluations],
            'first_step': round(run.metrics[0]['loss'], 4),
            'strategy': recipe.sharding.strategy,
            'seconds': round(run.ranks[0]['seconds'], 1)}


def measure() -> dict:
    "Train on the instructions, then on the reviews."
    rows = folder()
    tokenizer = published(rows)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = small_qwen3(tokenizer, place)
        words = followed(instruction_recipe(model, rows/'instructions.json'), place/'words')
        classes = followed(review_recipe(model, rows/'amazon_reviews.tsv'), place/'classes')
    return record('first_contact', words['held_out'][-1:], 'nats per token of held-out answers',
                  instructions=words, reviews=classes,
                  uniform={'instructions': round(log(VOCABULARY), 4), 'reviews': round(log(2), 4)})
