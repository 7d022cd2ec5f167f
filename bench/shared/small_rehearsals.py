"""Small recipes that a rehearsal is compared with, and how it is compared."""
import json
from collections import Counter
from pathlib import Path

QUIET = 2  # Steps that nothing watches; a third one never held more than the second
STEPS = QUIET + 1  # All


def _llama(hidden: int, intermediate: int, layers: int, heads: int, vocab: int) -> dict:
    return {
        'model_type': 'llama',
        'hidden_size': hidden,
        'intermediate_size': intermediate,
        'num_hidden_layers': layers,
        'num_attention_heads': heads,
        'num_key_value_heads': 4,
        'vocab_size': vocab,
    }


SHAPES = {
    'small': _llama(768, 2048, 12, 12, 16_000),  # 100 million parameters
    'large': _llama(1024, 2816, 8, 16, 32_000),  # 156 million
    'quick': _llama(384, 1024, 8, 8, 16_000),  # 25 million, for tests
    'brief': _llama(384, 1024, 3, 8, 8_000),  # 11 million, for ranks of ZeRO
}
FULL = {'method.kind': 'full'}
LORA = {'method.kind': 'lora'}
QLORA = {'method.kind': 'qlora'}
PAIRS = {'data.format': 'preference', 'method.objective': 'dpo'}
DORA = {'method.dora': True, 'method.scaling': 'rslora'}
AGAIN = {'sharding.activation_checkpointing': 'full'}


def recipe(shape: str, changes: dict, folder: Path):
    "A plain recipe for two CPU ranks with `changes`; its model has a configuration in `folder`."
    from llm_workbook import Recipe
    place = folder/shape
    place.mkdir(exist_ok=True)
    (place/'config.json').write_text(json.dumps(SHAPES[shape]))
    plain = Recipe(
        name='rehearsal-error',
        model={'source': str(place)},
        data={'source': 'sample-conversations'},
        cluster={'processes': 2},
        batch={'micro': 1, 'length': 256},
        optimizer={'steps': STEPS},
    )
    return plain.changed(changes)


# The comparison

def counted(messages: list) -> list:
    "How often each (kind, bytes of the whole tensor) occurs, as a record keeps it."
    return sorted([*message, n] for message, n in Counter(messages).items())


def percent(ours: int, truth: int) -> float:
    "The error of `ours` in percent of `truth`."
    return round(100 * (ours / truth - 1), 3)
