"""Where a part runs, and what it says it could not measure."""
import os
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path


class Missing(Exception):
    "This machine cannot run the part; the message says what is missing."


@dataclass(frozen=True)
class Place:
    "A device, and whether everything is small."
    device: str = 'cuda'  # Or 'cpu'
    toy: bool = False  # Tiny shapes and few repetitions

    @property
    def on_gpu(self) -> bool: return self.device == 'cuda'

    def pick(self, real, toy):
        "Take the size that fits."
        return toy if self.toy else real

    def wait(self) -> None:
        "Let the device finish what it was given."
        import torch
        if self.on_gpu: torch.cuda.synchronize()

    def seconds(self, call, times: int = 5) -> float:
        "The median of some timings of a call, after one that warms up."
        call()
        taken = []
        for _ in range(self.pick(times, 1)):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    def gpu_alone(self, names, reason: str) -> dict:
        "Say of figures that only a GPU has that they were not measured, and why."
        if self.on_gpu: return {}
        return {'missing': dict.fromkeys(names, reason)}


def plain(error: Exception) -> str:
    "An error on one line, without the folders of this machine."
    text = ' '.join(str(error).split())
    short = re.sub(r'(?:/[\w.+-]+)+/', '', text)
    return f'{type(error).__name__}: {short}'[-400:]


def hidden() -> dict:
    "The variables of a process that sees no GPU."
    return os.environ | {'CUDA_VISIBLE_DEVICES': ''}


def recipe_folder(folder: str, config: dict) -> str:
    "Write the configuration of a model where a recipe can name it."
    import json
    place = Path(folder)/'model'
    place.mkdir(exist_ok=True)
    (place/'config.json').write_text(json.dumps(config))
    return str(place)
