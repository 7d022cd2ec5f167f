"""A checkpoint of two DDP ranks goes on with one: half the batch, other rows, and no word of it."""
from llm_workbook import Recipe
from llm_workbook.parallel.ranks import run_ranks

SLOW = True  # Several ranks or models, in seconds of processor

CPU = {'ACCELERATE_USE_CPU': 'true'}


def train(resume=None):
    from resume_from_partial_checkpoint import trainer
    made = trainer()
    made.train(resume_from_checkpoint=resume)
    return made.args.train_batch_size * made.args.world_size


def broken():
    run_ranks(train, env=CPU, timeout_s=100)
    assert run_ranks(train, ranks=1, args=('run/checkpoint-1',), env=CPU) == [8]
    recipe = Recipe.named('reviews-qlora').changed({'cluster.processes': 1})
    return {'directory': 'run/checkpoint-1', 'recipe': recipe}


def mended():
    run_ranks(train, env=CPU, timeout_s=100)
    assert run_ranks(train, args=('run/checkpoint-1',), env=CPU) == [16, 16]
