"""The library's own path on real text: sentiment beside a bag of words, loss on instructions."""
import json
import os
import statistics
import tempfile
from collections import Counter
from math import comb
from pathlib import Path

from bench.record import ROOT, Skip, record

FILES = ('amazon_reviews.tsv', 'instructions.json')
SEEDS = range(5)
REVIEWS = {'name': 'real-reviews', 'data.text_column': 0, 'data.label_column': 1,
           'data.test_share': 0.0,
           'data.labels': {1: 'positive', 0: 'negative'}, 'batch.micro': 12}
INSTRUCTIONS = {'name': 'real-instructions', 'batch.micro': 8, 'batch.length': 160,
                'optimizer.steps': 300}
PEER = 'bag of words and logistic regression, scikit-learn as it comes'


def folder() -> Path:
    "Find the data: the folder that LLMW_DATA names, else shared/data beside the checkout."
    place = Path(os.environ.get('LLMW_DATA') or ROOT.parent/'shared/data')
    if absent := [name for name in FILES if not (place/name).is_file()]:
        raise Skip(f'no {" and no ".join(absent)}; set LLMW_DATA to the folder that holds them')
    return place


def review_recipe(source: Path) -> 'Recipe':
    "The recipe that the package names `reviews-qlora`, on the reviews in `source`."
    from llm_workbook import Recipe
    return Recipe.named('reviews-qlora').changed(REVIEWS | {'data.source': str(source)})


def instruction_recipe(source: Path) -> 'Recipe':
    "The same on instructions: a tenth of them is held out."
    from llm_workbook import Data
    data = Data(source=str(source), format='alpaca', test_share=0.1)
    return review_recipe(source).changed(INSTRUCTIONS | {'data': data})


def pool(recipe: 'Recipe') -> tuple[list, list]:
    "Divide the reviews once: 400 to tune settings on, which are never held out, and 600 others."
    from llm_workbook import load_rows, split_rows
    others, tuning = split_rows(load_rows(recipe.data)[0], 0.4, 2026)
    return tuning, others


def review_rows(source: Path, seed: int) -> tuple[list, list]:
    "The 800 and 200 of one seed; the 200 are drawn from what nothing was tuned on."
    from llm_workbook import split_rows
    tuning, others = pool(review_recipe(source))
    rest, test = split_rows(others, 1 / 3, seed)
    return tuning + rest, test


def divided(recipe: 'Recipe', train: list, test: list, place: Path) -> 'Recipe':
    "The same recipe on these rows, written into `place` as a user's own files."
    from llm_workbook import Data
    place.mkdir()
    for name, rows in ('train', train), ('test', test):
        (place/f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows),
                                           encoding='utf-8')
    return recipe.changed(data=Data(source=str(place), format='messages'))


def bag_of_words(train: list, test: list) -> float:
    "The share of `test` that a logistic regression over word counts labels rightly."
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    texts = lambda rows: [row['messages'][0]['content'].partition('\n')[2] for row in rows]
    words = lambda rows: [row['messages'][1]['content'] for row in rows]
    model = make_pipeline(CountVectorizer(), LogisticRegression(max_iter=1000)).fit(texts(train),
                                                                                    words(train))
    return float(model.score(texts(test), words(test)))


def chance(rows: list) -> float:
    "What needs no reading: the better of a coin and of always the more frequent answer."
    return max(0.5, max(Counter(row['messages'][1]['content']
                                for row in rows).values()) / len(rows))


def p_value(right: int, asked: int, share: float) -> float:
    "The exact binomial probability of at least `right` of `asked` by luck alone."
    return sum(comb(asked, k) * share**k * (1 - share)**(asked - k)
               for k in range(right, asked + 1))


def trained(recipe: 'Recipe', place: Path) -> tuple:
    "Fine-tune; return the run, the tokenizer, and the model before and after."
    from llm_workbook import fine_tune, load_adapters, load_base, resolve
    from transformers import AutoTokenizer
    run = fine_tune(recipe, place, timeout_s=420, live=False)
    tokenizer = AutoTokenizer.from_pretrained(resolve(recipe.model.source))
    base = load_base(recipe.model.source, recipe.method, recipe.precision, 'cpu')
    after = load_adapters(recipe.model.source, run.saved, recipe.method, recipe.precision, 'cpu')
    return run, tokenizer, base, after


def review_seed(source: Path, seed: int, place: Path) -> dict:
    "One seed: other rows held out, another start, another order."
    from llm_workbook import answers, check_recipe, exact_match
    recipe = divided(review_recipe(source).changed(seed=seed), *review_rows(source, seed),
                     place/f'rows-{seed}')
    train, test = check_recipe(recipe)
    run, tokenizer, base, after = trained(recipe, place/f'run-{seed}')
    before, share = (exact_match(test, answers(model, tokenizer, test, longest=6)).share
                     for model in (base, after))
    luck = chance(test)
    return {'seed': seed, 'train': len(train), 'held_out': len(test), 'before': before,
            'accuracy': share,
            'peer': bag_of_words(train, test), 'chance': luck,
            'p_value': p_value(round(share * len(test)), len(test), luck),
            'loss_last_steps': round(statistics.mean(m['loss'] for m in run.metrics[-20:]), 4),
            'seconds': round(run.ranks[0]['seconds'], 1)}


def held_out_loss(model, tokenizer, rows: list, length: int) -> float:
    "The mean loss over all answer tokens of `rows` within `length` tokens, nats per token."
    import torch
    from llm_workbook import assistant_mask
    total = count = 0
    for row in rows:
        ids, mask = (torch.tensor(part[:length]) for part in assistant_mask(row, tokenizer))
        with torch.inference_mode(): logits = model(input_ids=ids[None]).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction='none')
        total, count = total + float((losses * mask[1:]).sum()), count + int(mask[1:].sum())
    return total / count


def frequencies_loss(tokenizer, train: list, test: list, length: int) -> float:
    "The same loss for a model that only knows how often each token is in the training answers."
    from math import log
    from llm_workbook import assistant_mask
    def tokens(rows): return [i for row in rows for i,
                              on in list(zip(*assistant_mask(row, tokenizer)))[:length] if on]
    known, asked = Counter(tokens(train)), tokens(test)
    return -sum(log((known[i] + 1) / (known.total() + len(tokenizer))) for i in asked) / len(asked)


def instructions(source: Path, place: Path) -> dict:
    "Loss on held-out instructions before and after, beside that of token frequencies."
    from llm_workbook import check_recipe
    recipe = instruction_recipe(source)
    train, test = check_recipe(recipe)
    run, tokenizer, base, after = trained(recipe, place/'run-instructions')
    length = recipe.batch.length
    before, loss = (round(held_out_loss(model, tokenizer, test, length), 4)
                    for model in (base, after))
    return {'train': len(train), 'held_out': len(test), 'before': before, 'after': loss,
            'unit': 'nats per answer token',
            'frequencies': round(frequencies_loss(tokenizer, train, test, length), 4),
            'settings': settings(recipe), 'seconds': round(run.ranks[0]['seconds'], 1)}


def settings(recipe: 'Recipe') -> dict:
    "What a recipe says, without where its data lie."
    parts = {'model', 'method', 'cluster', 'sharding', 'batch', 'optimizer'}
    return recipe.model_dump(mode='json', include=parts, exclude_none=True)


def measure() -> dict:
    "Five seeds on the reviews, one run on the instructions."
    place = folder()
    with tempfile.TemporaryDirectory() as name:
        seeds = [review_seed(place/FILES[0], seed, Path(name)) for seed in SEEDS]
        told = instructions(place/FILES[1], Path(name))
    shares, peers = [row['accuracy'] for row in seeds], [row['peer'] for row in seeds]
    spread = {'spread': round(statistics.stdev(shares), 4),
              'peer_spread': round(statistics.stdev(peers), 4)}
    return record('real_data', shares, 'share of held-out reviews answered rightly', peers,
                  peer=PEER, worst=min(shares),
                  p_worst=max(row['p_value'] for row in seeds), seeds=seeds,
                  settings=settings(review_recipe(place/FILES[0])),
                  instructions=told, packages=['scikit-learn'], **spread)
