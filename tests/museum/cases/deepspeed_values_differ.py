"""The DeepSpeed file says '8' as a text, and the arguments say 8 as a number."""
from accelerate import DeepSpeedPlugin


def compare(accumulation):
    settings = {'gradient_accumulation_steps': accumulation, 'zero_optimization': {'stage': 2}}
    plugin = DeepSpeedPlugin(hf_ds_config=settings)
    plugin.deepspeed_config_process(gradient_accumulation_steps=8)
    return plugin.deepspeed_config['gradient_accumulation_steps']


def broken():
    compare('8')


def mended():
    assert compare('auto') == 8
