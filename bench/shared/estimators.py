"""What three other estimators say about a recipe: accelerate's, DeepSpeed's, and a bare count."""
import os
from functools import cache

from bench.shared.published import table

# Bytes per parameter of the bare rule: weights as loaded; a full fine-tune adds gradients, a
# float32 copy and two moments.
BARE = {'full': 16, 'lora': 2, 'qlora': 0.5}
SHARDED = ('fsdp1', 'fsdp2', 'zero3')


def config_of(source: str) -> dict:
    "Find the config.json of a preset, or of one of the table's own models."
    import yaml
    from llm_workbook import asset
    presets = yaml.safe_load(asset('models.yaml').read_text(encoding='utf-8'))
    return table()['models'].get(source) or presets[source]['config']


@cache
def float32_b(source: str) -> int:
    "Size in float32 as `accelerate estimate-memory` finds it: on the meta device, no head."
    from accelerate import init_empty_weights
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModel
    config = AutoConfig.for_model(**config_of(source))
    with init_empty_weights(): model = AutoModel.from_config(config, dtype='float32')
    return calculate_maximum_sizes(model)[0]


def accelerate_b(recipe) -> int:
    """The line of accelerate's table closest to `recipe`.

    'Training using Adam' in 16 bit, or 'Total Size' in float16 or int4.
    """
    from accelerate.commands.estimate import estimate_training_usage
    size = float32_b(recipe.model.source)
    if recipe.method.kind == 'full': return max(estimate_training_usage(size, 'bfloat16').values())
    return size // (8 if recipe.method.kind == 'qlora' else 2)


def deepspeed_b(recipe, spec) -> int:
    """DeepSpeed's model states for one GPU.

    Its stage 3 where weights are split, its stage 2 on one GPU where they are not.
    """
    os.environ.setdefault('DS_ACCELERATOR', 'cpu')
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as stage2
    cluster, away = recipe.cluster, recipe.sharding.offload_parameters != 'none'
    if recipe.sharding.strategy not in SHARDED: return stage2(spec.parameters, 1, 1,
                                                              cpu_offload=False)[1]
    largest = max(weight.numel for unit in spec.units for weight in unit.weights)
    return stage3(spec.parameters, largest, cluster.processes, cluster.nodes, cpu_offload=away,
                  cpu_offload_params=away)[1]


def bare_b(recipe, spec) -> int:
    "The bare rule: parameters times `BARE`, divided by the GPUs that share them."
    ranks = recipe.cluster.ranks if recipe.sharding.strategy in SHARDED else 1
    return int(spec.parameters * BARE[recipe.method.kind] / ranks)


def others(recipe, spec) -> dict[str, float]:
    "Give each estimator's GiB per GPU."
    said = {'accelerate': accelerate_b(recipe), 'deepspeed': deepspeed_b(recipe, spec),
            'bare rule': bare_b(recipe, spec)}
    return {name: size / 2**30 for name, size in said.items()}
