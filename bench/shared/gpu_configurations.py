"""Recipes that take three steps on a device: what they are, and their names."""
from bench.shared.small_rehearsals import AGAIN, FULL, LORA, QLORA

SMALL, MID = 'llama-3.2-1b', 'llama-3.1-8b'
WHOLE = {'batch.loss_head': 'full'}
HALF = {'precision.compute': 'float16', 'precision.loss_scale': 'dynamic',
        'method.storage': 'float16'}
EXACT = {'precision.compute': 'float32', 'method.storage': 'float32'}
ONE_PASS = {'batch.loss_head': 'one_pass'}
AWAY = {'sharding.offload_activations': 'cpu'}
SEGMENTS = {'model.attention': 'segments', 'batch.packing': True}  # Two examples in each row
CONFIGURATIONS = [  # Preset, method, tokens a row, rows, ranks, more
    (SMALL, FULL, 2048, 1, 1, {}), (SMALL, FULL, 2048, 1, 1, AGAIN),
    (SMALL, FULL, 2048, 4, 1, AGAIN), (SMALL, FULL, 2048, 1, 1, WHOLE),
    (SMALL, FULL, 1024, 1, 1, EXACT), (SMALL, FULL, 2048, 1, 1, AGAIN | HALF),
    (SMALL, FULL, 2048, 2, 1, {'optimizer.kind': 'adamw_fused'}),
    (SMALL, LORA, 2048, 1, 1, {}), (SMALL, LORA, 2048, 4, 1, AGAIN),
    (SMALL, LORA, 8192, 1, 1, AGAIN), (SMALL, LORA, 2048, 1, 1, WHOLE),
    (SMALL, LORA, 2048, 1, 1, AGAIN | HALF),
    (SMALL, QLORA, 2048, 1, 1, {}), (SMALL, QLORA, 2048, 4, 1, AGAIN),
    (SMALL, QLORA, 2048, 1, 1, WHOLE),
    (MID, LORA, 1024, 1, 1, AGAIN), (MID, LORA, 2048, 2, 1, AGAIN | WHOLE),
    (MID, QLORA, 1024, 1, 1, {}), (MID, QLORA, 2048, 1, 1, AGAIN), (MID, QLORA, 2048, 8, 1, AGAIN),
    (MID, QLORA, 8192, 1, 1, AGAIN),
    (SMALL, FULL, 2048, 1, 2, AGAIN), (MID, LORA, 2048, 1, 2, AGAIN),
    (MID, QLORA, 2048, 1, 2, AGAIN),
    (SMALL, FULL, 2048, 1, 1, ONE_PASS), (SMALL, LORA, 2048, 4, 1, AGAIN | ONE_PASS),
    (SMALL, FULL, 2048, 1, 1, SEGMENTS), (SMALL, LORA, 2048, 4, 1, AGAIN | SEGMENTS),
    (MID, LORA, 4096, 1, 1, AGAIN | ONE_PASS | SEGMENTS),
    (SMALL, LORA, 8192, 1, 1, AGAIN | AWAY), (SMALL, FULL, 2048, 4, 1, AGAIN | AWAY),
    (MID, QLORA, 8192, 1, 1, AGAIN | AWAY)]


def title(preset, method, length, micro, ranks, more) -> str:
    "Name a configuration."
    words = [preset, method['method.kind'], f'{micro}x{length}']
    said = {'again': AGAIN, 'whole-logits': WHOLE, 'float16': HALF, 'float32': EXACT,
            'one-pass': ONE_PASS, 'segments': SEGMENTS, 'away': AWAY}
    words += [key for key, part in said.items() if part.items() <= more.items()]
    if 'optimizer.kind' in more: words.append('fused')
    if ranks > 1: words.append(f'{ranks}-ranks')
    return '-'.join(words)
