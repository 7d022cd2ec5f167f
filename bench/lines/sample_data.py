"""Exact match on the packaged held-out questions, before and after the quickstart's fine-tune."""
import tempfile
from pathlib import Path

from bench.record import record

SEEDS = (0, 1, 2)


def one(seed: int) -> dict:
    "Fine-tune with `seed` on two ranks; shares before and after, and what it took."
    from llm_workbook import (
        Recipe, answers, check_recipe, exact_match, fine_tune, load_adapters, load_base, resolve,
        shrink)
    from transformers import AutoTokenizer
    recipe = shrink(Recipe.named('70b-2x24gb-qlora')).changed(seed=seed)
    held_out = check_recipe(recipe)[1]
    tokenizer = AutoTokenizer.from_pretrained(resolve(recipe.model.source))
    with tempfile.TemporaryDirectory() as folder:
        run = fine_tune(recipe, Path(folder)/'run', live=False)
        base = load_base(recipe.model.source, recipe.method, recipe.precision,
                         recipe.cluster.device)
        before = exact_match(held_out, answers(base, tokenizer, held_out))
        after = exact_match(held_out, answers(load_adapters(base, run.saved), tokenizer, held_out))
        return {'seed': seed, 'before': round(before.share, 4), 'after': round(after.share, 4),
                'families': {family: round(share, 4) for family, share in after.shares.items()},
                'train_s': round(run.ranks[0]['seconds'], 1),
                'host_peak_b': max(r['memory'].peak.host_b for r in run.ranks)}


def measure() -> dict:
    "Run every seed; the value is the median share after."
    runs = [one(seed) for seed in SEEDS]
    made = record('sample_data', [r['after'] for r in runs], 'share of exact answers', goal=0.8,
                  runs=runs,
                  before=max(r['before'] for r in runs), train_s=max(r['train_s'] for r in runs),
                  worst_family=min(min(r['families'].values()) for r in runs))
    return made | {'worst': min(r['after'] for r in runs)}
