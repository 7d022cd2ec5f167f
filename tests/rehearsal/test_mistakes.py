"""The programs of the page on mistakes, at other sizes, ranks and numbers of ranks; and what
healthy programs are told: nothing."""
import ast
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from page import ROOT

from llm_workbook.rehearsal import findings as checks

NAMES = [
    'storage that is not sharded', 'mixed types in one unit', 'a forgotten wrap',
    'a typo in a LoRA target', 'checkpointing with the wrong flag',
    'float32 scores of 128,256 words', 'accumulation that keeps graphs',
    'a mesh that does not divide the ranks', 'an optimizer made before sharding',
    'a save that gathers the model']
# What these cost hangs on the number of ranks, or on which of them it is; the page shows all ten on
# two
SHARDED = NAMES[0], NAMES[7], NAMES[9]
KEPT = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AugAssign
RUNS = 'play(', 'perform(', 'findings('


def definitions():
    "Give the statements of the page that define something, and run nothing."
    cells = json.loads((ROOT/'nbs/rehearsal/07_findings.ipynb').read_text('utf-8'))['cells']
    for source in (''.join(c['source']) for c in cells if c['cell_type'] == 'code'):
        if source.startswith('#|'): continue
        for node in ast.parse(source).body:
            text = ast.get_source_segment(source, node)
            made = isinstance(node, KEPT) and not (
                isinstance(node, ast.Assign) and any(word in text for word in RUNS))
            if made or 'set_num_threads' in text or text.startswith('bitsandbytes.'): yield text


@pytest.fixture(scope='module')
def page():
    "The page as a module: the recorder looks for the names that a program imports in modules."
    from llm_workbook.rehearsal.findings import check_program, findings
    made = sys.modules['mistakes'] = ModuleType('mistakes')
    vars(made).update(findings=findings, check_program=check_program)
    from bitsandbytes.nn import modules
    before = modules.fix_4bit_weight_quant_state_from_module
    for text in definitions(): exec(compile(text, 'mistakes', 'exec'), vars(made))
    yield made
    modules.fix_4bit_weight_quant_state_from_module = before


@pytest.mark.slow
@pytest.mark.parametrize('name', SHARDED)
def test_three_ranks_the_last_of_them_and_another_length(page, name):
    trial = next(t for t in page.TRIALS if t.name == name)
    wrong, right = (
        ({'group': 2, 'spare': -1}, {'group': 3}) if 'mesh' in name else ({}, trial.right))
    how = trial.how | {'length': trial.how.get('length', 256) + (-64 if 'storage' in name else 64)}
    bad, good = (page.play(trial.program, way, 3, 2, **how) for way in (wrong, right))
    _, real_bad, *more = page.perform(
        trial.program, right, wrong, *[right][: isinstance(bad, str)], ranks=3, **how)
    assert good[2] == [], (bad, real_bad)
    assert page.same(bad, real_bad[2:], trial.label), (bad, real_bad)
    if isinstance(bad, str): assert page.same(good, more[0][2:], trial.label), (good, more)
    else: assert len(bad[2]) == 1 and bad[2][0].size_b > 0 and bad[2][0].fix


def test_the_page_has_these_ten(page): assert [t.name for t in page.TRIALS] == NAMES


def test_more_micro_batches_keep_more(page):
    "A leak over steps is one over micro-batches."
    def leaky(here, kept=True):
        model = here.model()
        model = page.shard(model, model.model.layers)
        outputs = []
        optimizer = page.AdamW(model.parameters())
        here.watch(model, optimizer)
        for _ in range(3):
            ids = here.rows()
            out = model(input_ids=ids, labels=ids, use_cache=False)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if kept: outputs.append(out)
            del out
        return model, optimizer
    assert page.play(leaky, {'kept': False})[2] == []
    assert [f.cause.split(':')[0] for f in page.play(leaky)[2]] == ['activations']


# What a program finds that is right

def healthy(page, method, sharding, accumulation=1, checkpointing='none'):
    "The project's own functions, under the recorder."
    import torch
    from llm_workbook.model.adapters import add_adapters
    from llm_workbook.config.recipe import Method, Sharding
    from llm_workbook.parallel.shard import shard_model

    def program(here):
        model = here.model(torch.float32 if method == 'full' else torch.bfloat16)
        if method == 'qlora': model = page.pack(model, torch.bfloat16)
        if method != 'full': model = add_adapters(model, Method(kind=method))
        if sharding == 'ddp':
            model = torch.nn.parallel.DistributedDataParallel(model)
            # A pretended group gives nothing back to wait for
            model.register_comm_hook(None, reduced)
        else: model = shard_model(model, Sharding(activation_checkpointing=checkpointing))
        optimizer = page.AdamW([p for p in model.parameters() if p.requires_grad])
        here.watch(model, optimizer)
        for _ in range(2):
            for _ in range(accumulation):
                ids = here.rows()
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        here.phase('save')
        page.get_model_state_dict(model)
        return model, optimizer
    return program


def reduced(state, bucket):
    import torch
    torch.distributed.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.slow
@pytest.mark.parametrize('method, how', [
    ('full', {}), ('lora', {'checkpointing': 'full'}), ('qlora', {'accumulation': 3}),
    ('qlora', {'checkpointing': 'full'})])
def test_nothing_is_found_where_nothing_is_wrong(page, method, how):
    from llm_workbook.model.architecture import configuration
    config = configuration('llama-2-7b')[1] | {'num_hidden_layers': 4}
    played = page.play(
        healthy(page, method, 'fsdp2', **how), ranks=4, rank=3, config=config, length=1024)
    assert played[2] == [], played


@pytest.mark.parametrize('method', ['full', 'lora', 'qlora'])
def test_nothing_is_found_under_ddp(page, method):
    "With real tensors: DDP's own code in C++ reads them."
    from llm_workbook.rehearsal.recorder import recorded
    with recorded(4, 3, real=True) as recorder:
        here = page.Played(recorder, page.SMALL, 64)
        config = page.transformers.AutoConfig.for_model(**page.SMALL)
        here.model = lambda dtype: page.transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype)
        model, optimizer = healthy(page, method, 'ddp')(here)
    assert recorder.messages
    assert page.findings(recorder, model, optimizer) == []


def test_nothing_is_found_in_a_large_one(page):
    from llm_workbook.model.architecture import configuration
    config = configuration('llama-2-70b')[1] | {'num_hidden_layers': 4}
    assert (
        page.play(
            healthy(page, 'lora', 'fsdp2', checkpointing='full'), ranks=16, config=config,
            length=2048)[2]
        == [])


# Statements that the ten do not reach

def causes(page, change):
    "Make a step after `change` of the model; what is found."
    def program(here):
        model = here.model()
        trained = change(model)
        page.shard(model, model.model.layers) if trained is None else None
        return page.trained(here, model, page.AdamW(trained) if trained else None)
    return [f.cause for f in page.play(program)[2]]


def test_an_unused_parameter_is_named(page):
    import torch
    def spare(model): model.model.register_parameter('spare', torch.nn.Parameter(torch.ones(64)))

    assert causes(page, spare) == [
        'gradients: 1 of 40 trainable parameters never had one, first model.spare']


def test_a_parameter_that_no_optimizer_has_is_named(page):
    def most(model):
        page.shard(model, model.model.layers)
        return [p for name, p in model.named_parameters() if 'norm' not in name]

    assert causes(page, most) == [
        'optimizer: 9 of 39 trainable parameters are not in it, first '
        'model.layers.0.input_layernorm.weight'
    ]


def test_a_weight_that_was_left_out_is_named(page):
    def left(model):
        mesh, head = page.init_device_mesh('cpu', (2,)), model.lm_head.weight
        for layer in model.model.layers: page.fully_shard(layer, mesh=mesh)
        page.fully_shard(model, mesh=mesh, ignored_params={head})
        return list(model.parameters())

    assert causes(page, left) == [
        'weights: 2,097,152 bytes on every rank where a share of 1,048,576 was expected: 1 of 39 '
        'weights '
        'are not sharded, stored as float32']


@pytest.mark.parametrize('size, count', [(300, 0), (301, 1)])
def test_scores_of_words_are_named_from_a_third_of_the_peak_on(size, count):
    "By hand: 900 bytes at the peak, of which so many are scores of 100 words."
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(4, 100)
    program = SimpleNamespace(model=model, peak=0, peak_b=900, alive_b=lambda event, test: size)
    found = list(checks._whole_logits(program))
    assert [f.evidence for f in found] == [{'logits_b': size, 'peak_b': 900}] * count


@pytest.mark.parametrize('most, count', [(80, 0), (81, 1)])
def test_a_save_may_hold_two_weights_and_no_more(most, count):
    "By hand: weights of 40 and 20 bytes."
    weights = {'a': torch.zeros(10), 'b': torch.zeros(5)}
    program = SimpleNamespace(most_b=lambda test: most, parameters=weights)
    assert [f.evidence for f in checks._gathering_save(program)] == [
        {'save_b': most, 'whole_b': 60}] * count


def test_the_costliest_of_several_comes_first(monkeypatch):
    def finds(*sizes):
        return lambda program: [
            checks.Finding(f'costs {size}', 'fix it', size, {}) for size in sizes]

    monkeypatch.setattr(checks, '_Program', lambda *parts: None)
    monkeypatch.setattr(checks, '_CHECKS', [finds(), finds(3, 1), finds(7)])
    recorder = SimpleNamespace(modules=SimpleNamespace(names={1: 'a'}))
    assert [f.size_b for f in checks.findings(recorder, torch.nn.Linear(1, 1))] == [7, 3, 1]
    with pytest.raises(checks.ProgramProblem, match=r'costs 7; fix it \(and 2 more\)'):
        checks.check_program(recorder, torch.nn.Linear(1, 1))


def test_a_gate_names_the_costliest(page):
    from llm_workbook.rehearsal.recorder import recorded
    from llm_workbook.rehearsal.findings import ProgramProblem, check_program
    def both(here): return page.early(here, late=False)
    with recorded(2) as recorder: model, optimizer, _ = both(page.Played(recorder, page.SMALL, 64))
    with pytest.raises(
        ProgramProblem,
        match='39 of its 39 parameters are not in the model.*make the optimizer after sharding$'
    ):
        check_program(recorder, model, optimizer)


def test_both_ways_of_checkpointing_at_once_raise(page, tmp_path):
    """transformers refuses its own checkpointing beside that of FSDP2: under the recorder and on
    ranks."""
    def program(here):
        plugin = {
            'version': 2, 'activation_checkpointing': True,
            'auto_wrap_policy': 'TRANSFORMER_BASED_WRAP'}
        args = page.transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, fsdp='full_shard', fsdp_config=plugin,
            activation_checkpointing=True, report_to=[])
        with page.cpu_fsdp(): page.transformers.Trainer(here.model(), args)
    played = page.play(program)
    real = page.perform(program, {})
    assert page.same(played, real[0])
    assert played.startswith('ValueError')
    assert "can't both be set to True" in played
