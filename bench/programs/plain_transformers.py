"""Load directories with transformers alone, and write down the logits of one row for each.

Takes a JSON file: token ids, and for each directory the file for its logits. Prints what is missing
or left over in each, as JSON.
"""
import json
import sys
from pathlib import Path


def main(file: str) -> None:
    "Load each directory; an error is what is printed for it."
    import torch
    import transformers
    from transformers import AutoConfig, logging
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    asked = json.loads(Path(file).read_text())
    ids, found = torch.tensor(asked['ids']), {}
    for directory, result in asked['directories'].items():
        try:
            kind, = AutoConfig.from_pretrained(directory).architectures
            model, info = getattr(transformers, kind).from_pretrained(
                directory, output_loading_info=True, dtype=torch.float32)
            with torch.inference_mode(): logits = model(input_ids=ids).logits[0].float()
            torch.save(logits, result)
            found[directory] = [name for names in info.values() for name in names]
        except Exception as error:
            found[directory] = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
    if any(name.startswith('llm_workbook') for name in sys.modules):
        sys.exit('this process is to know transformers alone')
    print(json.dumps(found))


if __name__ == '__main__':
    main(sys.argv[1])
