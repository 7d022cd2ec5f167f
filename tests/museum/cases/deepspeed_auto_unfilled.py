"""`auto` in a DeepSpeed file is filled by whoever reads it; here nobody knows the value."""
from accelerate import DeepSpeedPlugin


def read(bucket):
    settings = {'zero_optimization': {'stage': 2, 'reduce_bucket_size': bucket}}
    plugin = DeepSpeedPlugin(hf_ds_config=settings)
    plugin.deepspeed_config_process(train_micro_batch_size_per_gpu=1)
    return plugin.deepspeed_config['zero_optimization']['reduce_bucket_size']


def broken():
    read('auto')


def mended():
    assert read(1_000_000) == 1_000_000
