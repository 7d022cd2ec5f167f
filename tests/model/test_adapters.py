"""Which modules a target means, before any weight is loaded, as PEFT reads it."""
import pytest

from llm_workbook.model.adapters import check_targets


@pytest.mark.parametrize('target', ['proj', '_proj', 'own_proj', 'attn.q_proj', 'q_pro'])
def test_a_target_is_a_whole_part_of_a_name(target):
    "PEFT compares whole names or what follows a dot: the end of a part finds nothing there."
    from llm_workbook.model.architecture import configuration, skeleton
    from peft import LoraConfig, get_peft_model
    name, raw = configuration('tiny-base')
    with pytest.raises(ValueError, match='Target modules .* not found'):
        get_peft_model(skeleton(raw, name), LoraConfig(target_modules=[target]))
    words = f"match no linear module of 'tiny-base': '{target}', did you mean"
    with pytest.raises(ValueError, match=words):
        check_targets('tiny-base', [target])


@pytest.mark.parametrize('target, count', [
    ('q_proj', 4), ('self_attn.q_proj', 4), ('layers.3.mlp.up_proj', 1)])
def test_the_end_of_a_name_is_enough(target, count):
    assert len(check_targets('tiny-base', [target])) == count
