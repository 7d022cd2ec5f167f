"""Seven ways to look right without being right, played mechanically on any exercise with ranks.

Each takes an exercise and gives one whose `run` cheats with the good answer, or instead of it.
"""
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from llm_workbook.exercises.judge import RankExercise

MESSAGES = 'send', 'recv'
COLLECTIVES = (
    'all_reduce', 'all_gather', 'all_gather_into_tensor', 'reduce_scatter',
    'reduce_scatter_tensor', 'broadcast', 'all_to_all', 'all_to_all_single', 'barrier')
NEWER = tuple(  # By which FSDP2 sends, where torch has them
    name for name in ('all_gather_single', 'reduce_scatter_single') if hasattr(dist, name))


class Done:
    "A handle of a message that nobody sent."
    def wait(self, *args): return True

    def is_completed(self): return True


@contextmanager
def replaced(functions: dict[str, Callable]):
    "Let torch.distributed have these functions in a rank."
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(patch.object(dist, name, function))
        yield


def silently(run):
    "1: communicate nothing: every function of torch.distributed leaves its tensors as they are."
    names = 'isend', 'irecv', *COLLECTIVES, *NEWER
    quiet = {name: lambda *args, **kwargs: Done() for name in names}
    quiet |= {name: lambda *args, **kwargs: None for name in MESSAGES}
    def cheat(answer, inputs, observed):
        with replaced(quiet): return run(answer, inputs, observed)
    return cheat


def emptied(value):
    "Zeros in the place of the tensors that a function would send."
    if isinstance(value, torch.Tensor): return torch.zeros_like(value)
    return [torch.zeros_like(tensor) for tensor in value]


def with_zeros(run):
    "2: send as many bytes as a good answer, all of them zero."
    def first(function): return lambda sent, *rest, **kw: function(emptied(sent), *rest, **kw)
    def second(function):
        def empty_and_call(*args, **kw):  # FSDP2 names its arguments
            named = [name for name in ('input_tensor', 'input') if name in kw]
            if named: return function(*args, **kw | {named[0]: emptied(kw[named[0]])})
            return function(args[0], emptied(args[1]), *args[2:], **kw)
        return empty_and_call
    def in_place(function):
        def empty_and_call(tensor, *rest, **kw):
            with torch.no_grad(): tensor.zero_()
            return function(tensor, *rest, **kw)
        return empty_and_call
    ways = dict.fromkeys(('isend', 'send'), first)
    ways |= dict.fromkeys(COLLECTIVES[1:5] + COLLECTIVES[6:8] + NEWER, second)
    ways |= dict.fromkeys(('all_reduce', 'broadcast'), in_place)
    def cheat(answer, inputs, observed):
        with replaced({name: way(getattr(dist, name)) for name, way in ways.items()}):
            return run(answer, inputs, observed)
    return cheat


def everything(inputs, rules):
    "Bring the numbers of all ranks to each, by what is allowed; padded to 4,096 numbers."
    flat = torch.cat([t.detach().flatten().float() for t in tree_leaves(inputs)
                      if isinstance(t, torch.Tensor)] or [torch.zeros(1)])[:4096]
    mine = torch.zeros(4096)
    mine[:len(flat)] = flat
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = torch.zeros(ranks, 4096)
    rows[rank] = mine
    if 'all_gather' in rules.allowed: dist.all_gather(list(rows), mine)
    elif 'all_reduce' in rules.allowed: dist.all_reduce(rows)
    else:
        for other in range(ranks):
            if other == rank: continue
            sending = dist.isend(mine, other)
            dist.recv(rows[other], other)
            sending.wait()
    return rows


def replicated(exercise, case):
    "3: bring all inputs to every rank and compute everything there, with the oracle itself."
    def cheat(answer, inputs, observed):
        everything(inputs, exercise.rules)
        gathered = [None] * case.ranks
        dist.all_gather_object(gathered, inputs)
        for limit in exercise.limits(case): observed.mark(limit.what)
        return exercise.expected(gathered, case)[dist.get_rank()]
    return cheat


def sleeping(run, pause):
    "4: wait by the clock, not for the other rank."
    def later(function):
        def call(*args, **kwargs):
            function(*args, **kwargs | {'async_op': True})
            pause(.02)
            return Done() if kwargs.get('async_op') else None
        return call
    def cheat(answer, inputs, observed):
        functions = {name: later(getattr(dist, name)) for name in COLLECTIVES + NEWER}
        coming = observed.coming = []  # If a handle is dropped, its sender waits for ever
        functions['recv'] = lambda tensor, source: (
            coming.append(dist.irecv(tensor, source)), pause(.05))
        with replaced(functions): out = run(answer, inputs, observed)
        pause(.05)
        return out
    return cheat


def sleep(seconds):
    "Sleep by the function that a rank has under this name."
    time.sleep(seconds)


def spin(seconds):
    "Pass time without `time.sleep`, which an exercise refuses."
    end = time.perf_counter() + seconds
    while time.perf_counter() < end: pass


def by_torch(exercise, case):
    "5: call what the exercise asks to write: a collective of torch, or a refused function."
    def cheat(answer, inputs, observed):
        if not {'all_gather', 'all_reduce'} & set(exercise.rules.allowed):
            dist.all_gather_object([None] * case.ranks, inputs)
        for name in exercise.rules.refused:
            module, _, attribute = name.rpartition('.')
            owner = torch
            for part in module.split('.')[1:]: owner = getattr(owner, part)
            getattr(owner, attribute)()
        if 'all_gather' not in exercise.rules.allowed:
            dist.all_gather([torch.zeros(1) for _ in range(case.ranks)], torch.zeros(1))
        return exercise.run(answer, inputs, observed)
    return cheat


def out_of_step(run, rules):
    "6: do all that a good answer does, and on rank 0 one call more."
    def cheat(answer, inputs, observed):
        out = run(answer, inputs, observed)
        if dist.get_rank(): return out
        more = torch.zeros(1)
        if 'send' in rules.allowed: observed.more = dist.isend(more, 1), more
        elif 'all_reduce' in rules.allowed: observed.more = dist.all_reduce(more, async_op=True)
        elif 'all_gather' in rules.allowed:
            into = [torch.zeros(1) for _ in range(dist.get_world_size())]
            observed.more = dist.all_gather(into, more, async_op=True)
        else: observed.more = dist.broadcast(more, 0, async_op=True)
        return out
    return cheat


def hoarding(run, rules):
    "7: bring everything to every rank once, keep it, and then do as a good answer does."
    def cheat(answer, inputs, observed):
        observed.hoard = everything(inputs, rules)
        return run(answer, inputs, observed)
    return cheat


CHEATS = {  # Name -> (exercise, case) to a `run`; the faults that may be named for it
    'silent': (lambda asked, case: silently(asked.run), {'silent', 'values'}),
    'zeros': (lambda asked, case: with_zeros(asked.run), {'values'}),
    'replicated': (replicated, {'refused', 'memory', 'traffic'}),
    'sleeps': (lambda asked, case: sleeping(asked.run, sleep), {'refused'}),
    'spins': (lambda asked, case: sleeping(asked.run, spin), {'order'}),
    'by torch': (by_torch, {'refused'}),
    'out of step': (lambda asked, case: out_of_step(asked.run, asked.rules), {'order'}),
    'hoards': (lambda asked, case: hoarding(asked.run, asked.rules), {'memory', 'traffic'}),
}


def cheating(exercise: RankExercise, name: str) -> RankExercise:
    "The exercise, in its largest case, with a `run` that cheats."
    case = max(exercise.cases, key=lambda case: case.ranks)
    return replace(exercise, cases=(case,), run=CHEATS[name][0](exercise, case), limit_s=5)
