"""Train on real text: the accuracy on reviews, and the loss on instructions.

A bag of words answers the same reviews. A model of token frequencies reads the same instructions.
"""
import json
import statistics
import tempfile
from collections import Counter
from math import comb, log
from pathlib import Path

from bench.record import record
from bench.shared.public_data import FILES, folder

SEEDS = range(3)
REVIEWS = {'name': 'real-reviews', 'data.text_column': 0, 'data.label_column': 1,
           'data.test_share': 0.0,
           'data.labels': {1: 'positive', 0: 'negative'}, 'batch.micro': 12}
INSTRUCTIONS = {'name': 'real-instructions', 'batch.micro': 8, 'batch.length': 160,
                'optimizer.steps': 300}
PEER = 'bag of words and logistic regression, scikit-learn as it comes'


# Recipes and rows

def review_recipe(source: Path) -> 'Recipe':
    "Make the packaged recipe `reviews-qlora` read the reviews in `source`."
    from llm_workbook import Recipe
    return Recipe.named('reviews-qlora').changed(REVIEWS | {'data.source': str(source)})


def instruction_recipe(source: Path) -> 'Recipe':
    "Make the same recipe read the instructions in `source`, and hold out a tenth of them."
    from llm_workbook import Data
    data = Data(source=str(source), format='alpaca', test_share=0.1)
    return review_recipe(source).changed(INSTRUCTIONS | {'data': data})


def settings(recipe: 'Recipe') -> dict:
    "Give the settings of a recipe without the place of its data."
    parts = {'model', 'method', 'cluster', 'sharding', 'batch', 'optimizer'}
    return recipe.model_dump(mode='json', include=parts, exclude_none=True)


def pool(recipe: 'Recipe') -> tuple[list, list]:
    "Divide the reviews once: 400 to choose settings with, which are never held out, and 600 more."
    from llm_workbook import load_rows, split_rows
    others, tuning = split_rows(load_rows(recipe.data)[0], 0.4, 2026)
    return tuning, others


def review_rows(source: Path, seed: int) -> tuple[list, list]:
    "Give 800 rows to train on and 200 held-out rows, which no setting was chosen with."
    from llm_workbook import split_rows
    tuning, others = pool(review_recipe(source))
    rest, test = split_rows(others, 1 / 3, seed)
    return tuning + rest, test


def divided(recipe: 'Recipe', train: list, test: list, place: Path) -> 'Recipe':
    "Write the rows into `place`, as a user's own files, and make the recipe read them."
    from llm_workbook import Data
    place.mkdir()
    for name, rows in {'train': train, 'test': test}.items():
        lines = [json.dumps(row) + '\n' for row in rows]
        (place/f'{name}.jsonl').write_text(''.join(lines), encoding='utf-8')
    return recipe.changed(data=Data(source=str(place), format='messages'))


def question(row: dict) -> str:
    "Give the text of a review: all lines of the first message except the first line."
    return row['messages'][0]['content'].partition('\n')[2]


def answer(row: dict) -> str:
    "Give the right answer to a review."
    return row['messages'][1]['content']


# What the accuracy is compared with

def bag_of_words(train: list, test: list) -> float:
    "Give the share of `test` that a logistic regression over word counts answers rightly."
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    model = make_pipeline(CountVectorizer(), LogisticRegression(max_iter=1000))
    model.fit([question(row) for row in train], [answer(row) for row in train])
    accuracy = model.score([question(row) for row in test], [answer(row) for row in test])
    return float(accuracy)


def chance(rows: list) -> float:
    "Give the accuracy without reading: always the more frequent answer, or a coin if better."
    counts = Counter(answer(row) for row in rows)
    return max(0.5, max(counts.values()) / len(rows))


def p_value(right: int, asked: int, share: float) -> float:
    "Give the exact binomial probability of at least `right` of `asked` by luck alone."
    return sum(comb(asked, k) * share**k * (1 - share)**(asked - k)
               for k in range(right, asked + 1))


# Reviews

def trained(recipe: 'Recipe', place: Path) -> tuple:
    "Fine-tune; return the run, the tokenizer, and the model before and after."
    from llm_workbook import fine_tune, load_adapters, load_base, resolve
    from transformers import AutoTokenizer
    run = fine_tune(recipe, place, timeout_s=420, live=False)
    model, method, precision = recipe.model, recipe.method, recipe.precision
    tokenizer = AutoTokenizer.from_pretrained(resolve(model.source))
    before = load_base(model.source, method, precision, 'cpu')
    after = load_adapters(model.source, run.saved, method, precision, 'cpu')
    return run, tokenizer, before, after


def review_seed(source: Path, seed: int, place: Path) -> dict:
    "Train with one seed, which chooses the held-out rows, the start and the order."
    from llm_workbook import answers, check_recipe, exact_match
    rows = review_rows(source, seed)
    recipe = divided(review_recipe(source).changed(seed=seed), *rows, place/f'rows-{seed}')
    train, test = check_recipe(recipe)
    run, tokenizer, base, tuned = trained(recipe, place/f'run-{seed}')
    before = exact_match(test, answers(base, tokenizer, test, longest=6)).share
    accuracy = exact_match(test, answers(tuned, tokenizer, test, longest=6)).share
    luck = chance(test)
    last_losses = [line['loss'] for line in run.metrics[-20:]]
    return {'seed': seed, 'train': len(train), 'held_out': len(test), 'before': before,
            'accuracy': accuracy,
            'peer': bag_of_words(train, test), 'chance': luck,
            'p_value': p_value(round(accuracy * len(test)), len(test), luck),
            'loss_last_steps': round(statistics.mean(last_losses), 4),
            'seconds': round(run.ranks[0]['seconds'], 1)}


# Instructions

def held_out_loss(model, tokenizer, rows: list, length: int) -> float:
    "Give the mean loss in nats over the answer tokens within the first `length` tokens."
    import torch
    from llm_workbook import assistant_mask
    total = 0
    count = 0
    for row in rows:
        ids, mask = (torch.tensor(part[:length]) for part in assistant_mask(row, tokenizer))
        with torch.inference_mode(): logits = model(input_ids=ids[None]).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction='none')
        is_answer = mask[1:]
        total += float((losses * is_answer).sum())
        count += int(is_answer.sum())
    return total / count


def answer_tokens(tokenizer, rows: list, length: int) -> list[int]:
    "List the answer tokens of all rows within the first `length` tokens of each."
    from llm_workbook import assistant_mask
    tokens = []
    for row in rows:
        ids, mask = assistant_mask(row, tokenizer)
        pairs = zip(ids[:length], mask[:length])
        tokens += [token for token, is_answer in pairs if is_answer]
    return tokens


def frequencies_loss(tokenizer, train: list, test: list, length: int) -> float:
    "Give the same loss for a model that only knows how often each token is in the answers."
    counts = Counter(answer_tokens(tokenizer, train, length))
    asked = answer_tokens(tokenizer, test, length)
    denominator = counts.total() + len(tokenizer)  # Every token counts once more than it occurs
    return -sum(log((counts[token] + 1) / denominator) for token in asked) / len(asked)


def instructions(source: Path, place: Path) -> dict:
    "Give the loss on held-out instructions before and after, and that of token frequencies."
    from llm_workbook import check_recipe
    recipe = instruction_recipe(source)
    train, test = check_recipe(recipe)
    run, tokenizer, base, tuned = trained(recipe, place/'run-instructions')
    length = recipe.batch.length
    before = held_out_loss(base, tokenizer, test, length)
    after = held_out_loss(tuned, tokenizer, test, length)
    frequencies = frequencies_loss(tokenizer, train, test, length)
    return {'train': len(train), 'held_out': len(test), 'before': round(before, 4),
            'after': round(after, 4),
            'unit': 'nats per answer token',
            'frequencies': round(frequencies, 4),
            'settings': settings(recipe), 'seconds': round(run.ranks[0]['seconds'], 1)}


def measure() -> dict:
    "Train on the reviews with three seeds, and on the instructions once."
    place = folder()
    reviews, conversations = (place/name for name in FILES)
    with tempfile.TemporaryDirectory() as name:
        seeds = [review_seed(reviews, seed, Path(name)) for seed in SEEDS]
        instruction_losses = instructions(conversations, Path(name))
    accuracies = [row['accuracy'] for row in seeds]
    peers = [row['peer'] for row in seeds]
    return record('real_data', accuracies, 'share of held-out reviews answered rightly', peers,
                  peer=PEER, worst=min(accuracies),
                  p_worst=max(row['p_value'] for row in seeds), seeds=seeds,
                  settings=settings(review_recipe(reviews)),
                  instructions=instruction_losses, packages=['scikit-learn'],
                  spread=round(statistics.stdev(accuracies), 4),
                  peer_spread=round(statistics.stdev(peers), 4))
