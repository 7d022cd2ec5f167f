"""Some steps of a recipe in the library's own trainer, as one rank of torchrun.

The rank has a network interface to itself. Started with a recipe, a folder for the run and one for
the answer: writes what the interface sent and received between the start of the second step and
the start of the last.
"""
import json
import sys
import time
from pathlib import Path

FIRST, STEPS = 1, 4  # Steps before the count begins, and counted ones


def counters(interface: str) -> tuple[int, int]:
    "Bytes that `interface` has sent and received since it is up."
    rows = (line.split(':') for line in Path('/proc/self/net/dev').read_text().splitlines()[2:])
    fields = next(row[1].split() for row in rows if row[0].strip() == interface)
    return int(fields[8]), int(fields[0])


def main(file: str, folder: str, answer: str) -> None:
    "Train, and count."
    import os
    import transformers.trainer
    from llm_workbook.config.recipe import Recipe
    from llm_workbook.parallel.backends import fsdp_env
    from llm_workbook.training.fine_tune import check_recipe, train_rank
    recipe, seen = Recipe.load(file), []
    os.environ.update(fsdp_env(recipe))
    name = recipe.cluster.interface

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **more):
            if state.global_step in (FIRST, FIRST
                                     + STEPS): seen.append((*counters(name), time.monotonic()))
    transformers.trainer.DEFAULT_CALLBACKS.append(Watch)
    train_rank(recipe, Path(folder), check_recipe(recipe)[0])
    (sent, received, start), (sent_then, received_then, end) = seen
    made = {'sent_b': sent_then - sent, 'received_b': received_then - received,
            'seconds': end - start}
    (Path(answer)/f'rank{os.environ["RANK"]}.json').write_text(json.dumps(made))


if __name__ == '__main__': main(*sys.argv[1:])
