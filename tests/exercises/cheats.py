"""Seven ways to look right without being right, played mechanically on any exercise with ranks.

Each gives fields that an exercise is changed in: a `run` that cheats with the good answer, or
instead of it.
"""
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

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


class Form(NamedTuple):
    "All of a tensor but its numbers."
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    @property
    def size_b(self) -> int: return math.prod(self.shape) * self.dtype.itemsize

    def filled(self, row: torch.Tensor) -> torch.Tensor:
        "The tensor with these bytes."
        if row.storage_offset() % self.dtype.itemsize: row = row.clone()  # Else there is no view
        return row.view(self.dtype).view(self.shape).requires_grad_(self.needs_gradient)


def tensors_for(inputs):
    "The same with a tensor for each flag, since a flag says what happened on one rank."
    def one(leaf): return torch.tensor(leaf) if isinstance(leaf, bool) else leaf
    return tree_map(one, inputs)


def form_of(leaf):
    "What each rank may know of an input of another: of a tensor its form, else all."
    if not isinstance(leaf, torch.Tensor): return leaf
    return Form(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)


def is_form(value) -> bool: return isinstance(value, Form)


def size_b(known) -> int:
    "Bytes of the tensors whose forms are known."
    leaves = tree_leaves(known, is_leaf=is_form)
    return sum(leaf.size_b for leaf in leaves if is_form(leaf))


def as_bytes(inputs) -> torch.Tensor:
    "The numbers of all tensors in a row of bytes."
    tensors = [leaf.detach() for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    rows = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)


def filled(known, row: torch.Tensor):
    "The inputs of a rank, from what is known of them and a row of their bytes."
    begin = 0
    def one(leaf):
        nonlocal begin
        if not is_form(leaf): return leaf
        begin += leaf.size_b
        return leaf.filled(row[begin - leaf.size_b:begin])
    return tree_map(one, known, is_leaf=is_form)


def brought(mine: torch.Tensor, sizes: list[int], allowed: tuple[str, ...]) -> list[torch.Tensor]:
    "Bring the bytes of all ranks to each rank, by that of the allowed calls which sends least."
    rank, ranks, most = dist.get_rank(), len(sizes), max(sizes)
    if 'all_gather' in allowed:
        rows = [torch.zeros(most, dtype=torch.uint8) for _ in sizes]
        rows[rank][:len(mine)] = mine
        dist.all_gather(rows, rows[rank])
        return rows
    if 'send' in allowed or 'broadcast' in allowed:
        rows = [mine.new_empty(size) for size in sizes]
        rows[rank] = mine
        if 'send' in allowed: exchange(rows)
        else:
            for source in range(ranks): dist.broadcast(rows[source], source)
        return rows
    together = mine.new_zeros(sum(sizes))
    rows = list(together.split(sizes))
    rows[rank].copy_(mine)
    dist.all_reduce(together)
    return rows


def exchange(rows: list[torch.Tensor]) -> None:
    "Send the row of this rank to each other one, and receive theirs."
    rank = dist.get_rank()
    others = [other for other in range(len(rows)) if other != rank]
    sending = [dist.isend(rows[rank], other) for other in others]
    for other in others: dist.recv(rows[other], other)
    for work in sending: work.wait()


def replicated(exercise, case):
    """3: bring all inputs to every rank by allowed calls, and let the oracle compute all there.

    Shapes, and whatever is no tensor and no flag, each rank knows of the others before. It may call
    what the exercise refuses: only memory and traffic are to speak against it.
    """
    known = []
    def draw(case, rank, generator):
        inputs = exercise.draw(case, rank, generator)
        known[:] = [None] * case.ranks
        dist.all_gather_object(known, tree_map(form_of, tensors_for(inputs)))
        return inputs
    def run(answer, inputs, observed):
        sizes = [size_b(each) for each in known]
        rows = brought(as_bytes(tensors_for(inputs)), sizes, exercise.rules.allowed)
        outputs = list(exercise.expected(list(map(filled, known, rows)), case))
        for limit in exercise.limits(case): observed.mark(limit.what)
        return outputs[dist.get_rank()]
    return {'draw': draw, 'run': run, 'rules': replace(exercise.rules, refused=())}


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
    return {'run': cheat}


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


def runs(cheat, *arguments):
    "A cheat that changes `run` alone."
    return lambda asked, case: {'run': cheat(asked.run, *arguments)}


CHEATS = {  # Name -> (exercise, case) to fields of it; the faults that may be named
    'silent': (runs(silently), {'silent', 'values'}),
    'zeros': (runs(with_zeros), {'values'}),
    'replicated': (replicated, {'memory', 'traffic'}),
    'sleeps': (runs(sleeping, sleep), {'refused'}),
    'spins': (runs(sleeping, spin), {'order'}),
    'by torch': (by_torch, {'refused'}),
    'out of step': (lambda asked, case: {'run': out_of_step(asked.run, asked.rules)}, {'order'}),
    'hoards': (lambda asked, case: {'run': hoarding(asked.run, asked.rules)},
               {'memory', 'traffic'}),
}
NO_CHEAT = {  # Exercises that ask for what a cheat does
    ('replicated', '5.4'): 'each rank is to have the bytes of all',
    ('replicated', '6.1'): 'each rank is to have the numbers of all'}


def cheating(exercise: RankExercise, name: str) -> RankExercise:
    "The exercise, in its largest case, changed so that it cheats."
    case = max(exercise.cases, key=lambda case: case.ranks)
    changed = CHEATS[name][0](exercise, case)
    return replace(exercise, cases=(case,), limit_s=8, **changed)
