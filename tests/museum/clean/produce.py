"""Make the texts of this folder anew: `python tests/museum/clean/produce.py [NAME ...]`.

Each function below is one text: what it prints and raises, in a fork, in an empty folder. `near_`
shares words with a signature of the doctor and is another error, or none; `good_` is a good run, or
an error that no rule is for.
"""
import contextlib
import datetime
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from llm_workbook import Recipe, estimate, fine_tune, shrink
from llm_workbook.files import asset
from llm_workbook.parallel.ranks import run_ranks

HERE = Path(__file__).parent
ROW = {'input_ids': [5, 6, 7], 'labels': [5, 6, 7]}


def base(**options): return AutoModelForCausalLM.from_pretrained(asset('tiny-base'), **options)


def adapted(): return get_peft_model(base(), LoraConfig(target_modules=['q_proj', 'v_proj']))


def train(model, **options):
    options = {'max_steps': 3, 'logging_steps': 1, 'report_to': 'none', 'use_cpu': True,
               'disable_tqdm': True} | options
    trainer = Trainer(model, TrainingArguments('run', **options), train_dataset=[ROW] * 8)
    return trainer.train()


# Near misses

def near_flatten_shapes(): torch.nn.Flatten(2)(torch.zeros(2))


def near_two_dtypes(): torch.nn.Linear(2, 2)(torch.zeros(1, 2, dtype=torch.bfloat16))


def near_expected_dtype(): torch.zeros(2, dtype=torch.int64) @ torch.zeros(2, dtype=torch.float32)


def near_unflatten():
    torch.utils._pytree.tree_unflatten([1, 2], torch.utils._pytree.tree_flatten({'a': 1})[1])


def near_key_text_of_pandas(): pd.DataFrame({'prompt': ['a']})['text']


def near_integer_gradient(): torch.zeros(2, dtype=torch.int64).requires_grad_()


def near_gradient_of_a_leaf():
    with torch.no_grad(): loss = base()(input_ids=torch.arange(4)[None]).logits.sum()
    loss.backward()


def near_everything_frozen():
    model = base()
    for parameter in model.parameters(): parameter.requires_grad = False
    model(input_ids=torch.arange(4)[None], labels=torch.arange(4)[None]).loss.backward()


def near_backward_twice():
    loss = (torch.ones(2, requires_grad=True) ** 2).sum()
    loss.backward()
    loss.backward()


def near_missing_keys_of_a_model():
    torch.nn.Linear(2, 2).load_state_dict({'weight': torch.zeros(2, 2)})


def near_missing_head_of_an_adapter():
    model = get_peft_model(base(), LoraConfig(target_modules=['q_proj'], modules_to_save=['norm']))
    model.save_pretrained('adapter')
    tensors = load_file('adapter/adapter_model.safetensors')
    save_file({name: tensor for name, tensor in tensors.items() if 'norm' not in name},
              'adapter/adapter_model.safetensors', {'format': 'pt'})
    with warnings.catch_warnings():
        warnings.simplefilter('always')
        PeftModel.from_pretrained(base(), 'adapter')


def near_unknown_key_of_a_checkpoint():
    import torch.distributed.checkpoint as dcp
    dcp.save({'model': {'a': torch.ones(1)}}, checkpoint_id='saved', no_dist=True)
    dcp.load({'model': {'b': torch.ones(1)}}, checkpoint_id='saved', no_dist=True)


def near_checkpoint_with_another_shape():
    train(base(), max_steps=1, save_steps=1)
    other = base()
    other.resize_token_embeddings(1300)
    trainer = Trainer(other, TrainingArguments('run', max_steps=2, report_to='none', use_cpu=True),
                      train_dataset=[ROW] * 8)
    trainer.train(resume_from_checkpoint=True)


def near_no_such_folder(): load_file('nowhere/model.safetensors')


def near_json_of_python(): json.loads('{"text": "one"')


def near_no_space_in_a_name():
    raise ValueError("argument --name: 'no space left' is not a valid run name")


def near_shared_memory_is_full():
    print('misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 '
          'bytes, error: No space left on device (28)')


def near_timeout_of_a_download():
    import requests
    raise requests.exceptions.ReadTimeout(
        "HTTPSConnectionPool(host='example.org', port=443): Read timed out. (read timeout=10)")


def near_timeout_of_a_queue():
    import queue
    queue.Queue().get(timeout=0.01)


def near_dtensor_in_a_message():
    raise ImportError("cannot import name 'DTensor' from 'torch.distributed.tensor.parallel'")


def near_grad_norm_is_large():
    print({'loss': '2.31', 'grad_norm': '1.9e+03', 'learning_rate': '5e-05', 'epoch': '1'})
    print({'loss': '2.29', 'grad_norm': '7.2', 'learning_rate': '5e-05', 'nan_count': '0'})


def near_eval_loss_is_nan_free():
    print('checked 3,344,640 parameters for nan and inf: none')


def near_merge_of_16_bit_adapters():
    adapted().merge_and_unload()
    print('merged the lora modules into 16-bit linear layers')


def near_too_long_for_the_model():
    base()(input_ids=torch.full((1, 2), 5000))


def near_template_of_another_kind():
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}])


def near_pickle_of_a_lambda_elsewhere():
    raise AttributeError("Can't set attribute 'forward' of a local object that is frozen")


def near_cuda_is_not_there(): torch.zeros(1, device='cuda')


def near_port_of_a_server(): int('EADDR')


# Good runs and other errors

def good_trainer_run(): train(base())


def good_adapter_run(): train(adapted())


def good_recomputed_run(): train(adapted(), gradient_checkpointing=True)


def good_saved_and_resumed():
    train(base(), save_steps=1)
    trainer = Trainer(base(), TrainingArguments('run', max_steps=4, report_to='none', use_cpu=True,
                                                disable_tqdm=True, logging_steps=1),
                      train_dataset=[ROW] * 8)
    trainer.train(resume_from_checkpoint=True)


def good_two_ranks():
    def report():
        import torch.distributed as dist
        total = torch.ones(1)
        dist.all_reduce(total)
        print(f'rank {dist.get_rank()}: sum {total.item()}')
    run_ranks(report)


def good_library_run():
    recipe = shrink(Recipe.named('reviews-qlora')).changed({'optimizer.steps': 4})
    print(fine_tune(recipe, 'run', live=False))
    for log in sorted(Path('run/logs').glob('*.log')): print(log.read_text()[-2000:])


def good_plan(): print(estimate(Recipe.named('70b-2x24gb-qlora')))


def good_refused_recipe(): Recipe.named('reviews-qlora').changed({'method.rank': 0})


def good_unknown_recipe(): Recipe.named('reviews')


def good_generation():
    tokenizer = AutoTokenizer.from_pretrained(asset('tiny-base'))
    ids = tokenizer('Add 2 and 3.', return_tensors='pt')
    print(tokenizer.decode(base().generate(**ids, max_new_tokens=8)[0]))


def good_adapter_round_trip():
    adapted().save_pretrained('adapter')
    print(type(PeftModel.from_pretrained(base(), 'adapter')).__name__, 'loaded')


def good_syntax_error(): compile('def f(:', 'train.py', 'exec')


def good_missing_module(): import flash_attn  # noqa: F401


def good_division(): print(1 / 0)


def good_shape_mismatch(): torch.zeros(2, 3) @ torch.zeros(2, 3)


def good_index(): torch.zeros(3)[5]


def good_keyboard_interrupt(): raise KeyboardInterrupt


def good_assertion(): np.testing.assert_allclose([1.0], [1.1])


def good_file_is_missing(): open('rows.jsonl').read()


def good_unicode(): b'\xff\xfe'.decode('utf-8')


def good_bad_argument(): TrainingArguments('run', warmup_stepz=3)


def good_attribute(): print(base().nonexistent_head)


def good_type_error(): base()(input_ids='Add 2 and 3.')


def good_recursion():
    def again(): again()
    again()


def good_yaml():
    import yaml
    yaml.safe_load('a: [1, 2')


def written(function) -> str:
    "What a function prints and raises, without the paths of this machine."
    with tempfile.TemporaryFile('w+') as output, tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            for stream in 1, 2: os.dup2(output.fileno(), stream)
            with contextlib.suppress(BaseException):
                try: function()
                except BaseException: traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(child, 0)
        output.seek(0)
        text = output.read().replace('\r', '\n').replace(folder, '')
    text = re.sub(r'File "[^"]*/(?:site-packages|lib/python3\.\d+)/', 'File "', text)
    text = re.sub(r'File "[^"]*/llm_workbook/', 'File "llm_workbook/', text)
    return re.sub(r'(?:/[\w.-]+)+/(?:site-packages/|tests/museum/|llm_workbook/)', '', text)


def main(names: list[str]) -> None:
    "Write the texts in `names`, or all."
    made = ', '.join(f'{name} {version(name)}' for name in ('torch', 'transformers', 'peft'))
    known = {name: one for name, one in globals().items() if name.startswith(('near_', 'good_'))}
    for name in names or known:
        head = f'# Source: produce.py, {name}, {datetime.date.today()}, {made}\n'
        (HERE/f'{name}.txt').write_text(head + written(known[name]), encoding='utf-8')


if __name__ == '__main__':
    main(sys.argv[1:])
